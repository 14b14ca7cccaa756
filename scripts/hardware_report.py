"""Runs an artifact of the target neuron on the Neuron device of this machine, and writes a report to send back:
versions, parity with the float32 CPU model, time to the first token, time per token, memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nxdi_qwen.compile.distributed import library_output_on_stderr
from nxdi_qwen.compile.hardware_facts import device_files
from nxdi_qwen.compile.hardware_report import Choices, make_report
from nxdi_qwen.compile.neuron_application import load_application
from nxdi_qwen.compile.neuron_artifact import NeuronArtifact, open_neuron_artifact
from nxdi_qwen.compile.neuron_options import check_neuron_target
from nxdi_qwen.compile.source import ModelSource
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.parity.bands import TOLERANCES
from nxdi_qwen.parity.compare import MOE_BFLOAT16_TOLERANCE
from nxdi_qwen.parity.prompts import length_prompts, repeated_prompts
from nxdi_qwen.scripts import command

PROMPT_LENGTHS = (128, 1024)
PARITY_LENGTHS = (1, 3, 64, 65, 130)
NOT_WELL = 1  # exit status where a section failed, or parity is above its tolerance


def build_parser() -> command.Parser:
    parser = command.Parser(prog="nxdi-qwen-hardware-report", description=__doc__)
    parser.add_argument("--artifacts", type=Path, required=True, metavar="DIR", help="from neuron-compile")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="the checkpoint it was compiled from")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("hardware-report.json"),
        metavar="FILE",
        help="the report; must not exist yet (default hardware-report.json)",
    )
    parser.add_argument("--json", action="store_true", help="print the report instead of a summary")
    parser.add_argument(
        "--prompt-lengths", type=command.integers, metavar="N,N", help="to time; default: those of 128,1024 that fit"
    )
    parser.add_argument("--new-tokens", type=int, default=64, metavar="N", help="decode steps a round (default 64)")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="rounds that count (default 5)")
    return parser


def hardware_report(arguments: list[str] | None) -> int:
    options = build_parser().parse_args(arguments)
    artifact, source, choices = _checked(options)
    check_device()

    def save(report: dict[str, Any]) -> None:
        command.write_file(options.out, _as_json(report), "--out")

    with library_output_on_stderr(), command.progress_bars() as progress:
        report = make_report(lambda: load_application(artifact), artifact, source, choices, progress, save)
    if options.json:
        print(_as_json(report), end="")
    else:
        _print(report, options.out)
    return NOT_WELL if report["failures"] or report["parity"]["passed"] is False else 0


def check_device() -> None:
    """Raises InputError where nothing can run on Neuron."""
    check_neuron_target()
    if not device_files():
        raise InputError("this machine has no Neuron device (no /dev/neuron0): run it on a Trainium host")


def _checked(options: Any) -> tuple[NeuronArtifact, ModelSource, Choices]:
    """Raises InputError for what cannot be measured, before anything is loaded."""
    for name in ("new_tokens", "repeat"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(options, name)} is not possible: give at least 1")
    if options.out.exists():
        raise InputError(f"{options.out} exists: remove it, or choose another file with --out")
    if not options.out.absolute().parent.is_dir():
        raise InputError(f"no folder {options.out.parent}: make it, or choose another place with --out")
    artifact = open_neuron_artifact(options.artifacts)
    source = ModelSource.from_checkpoint(options.model)
    artifact.check_model(source.config)
    coarse = source.config.num_experts and artifact.dtype == "bfloat16"
    vocab_size = source.config.vocab_size
    prompts = [*length_prompts(vocab_size, PARITY_LENGTHS), repeated_prompts(vocab_size)[0]]
    choices = Choices(
        parity_prompts={prompt.name: prompt.ids for prompt in prompts},
        tolerance=MOE_BFLOAT16_TOLERANCE if coarse else TOLERANCES[artifact.dtype][None],
        prompt_lengths=_prompt_lengths(options.prompt_lengths, artifact, options.new_tokens),
        new_tokens=options.new_tokens,
        repeat=options.repeat,
    )
    return artifact, source, choices


def _prompt_lengths(chosen: tuple[int, ...] | None, artifact: NeuronArtifact, new_tokens: int) -> list[int]:
    if chosen is not None:
        if not chosen or min(chosen) < 1:
            raise InputError("--prompt-lengths must be numbers from 1, for example --prompt-lengths 128,1024")
        for length in chosen:
            artifact.check_length(length, new_tokens)
        return list(chosen)
    fitting = []
    for length in PROMPT_LENGTHS:
        try:
            artifact.check_length(length, new_tokens)
        except InputError as error:
            reason = error
        else:
            fitting.append(length)
    if not fitting:
        raise InputError(f"no default prompt length fits, give --prompt-lengths or --new-tokens: {reason}")
    return fitting


def _as_json(report: dict[str, Any]) -> str:
    return json.dumps(report, indent=2, allow_nan=False) + "\n"


def _print(report: dict[str, Any], out: Path) -> None:
    console, artifact, installed = Console(), report["artifact"], report["versions"]
    table = Table(
        title=escape(f"{artifact['name']} on {report['device'] or 'no device: it was not loaded'}"), show_header=False
    )
    table.add_row("artifact", f"{artifact['family']}, {artifact['layers']} layers, {artifact['dtype']}")
    table.add_row("", f"degree {artifact['degree']}, {artifact['slots']} slots of {artifact['max_length']} tokens")
    for name in ("instance_type", "neuron_devices"):
        table.add_row(name.replace("_", " "), _shown(report["machine"][name]))
    for name in ("torch", "torch-neuronx", "neuronx-cc", "neuronx-distributed-inference", "neuron driver"):
        table.add_row(name, _shown(installed[name]))
    if report["memory"] is not None:
        table.add_row("weights a rank", " ".join(sorted({_gb(size) for size in _weights(report)})))
        table.add_row("state a rank", _gb(report["memory"]["state_bytes_per_rank"]))
        table.add_row("host memory", _shown(report["memory"]["host_rss_bytes"], _gb))
        table.add_row("device memory", _shown(report["memory"]["device_memory"], _device_gb))
    console.print(table)
    if report["speed"] is not None:
        console.print(_speed_table(report["speed"]))
    if report["parity"] is not None:
        _print_parity(console, report["parity"])
    for failure in report["failures"]:
        print(f"FAILED in {failure['section']}: {failure['error']}")
    print(f"Written to {out}. Please read it, and send it back.")


def _print_parity(console: Console, parity: dict[str, Any]) -> None:
    for name, reason in parity["skipped"].items():
        print(f"prompt {name} left out: {reason}")
    if "not_run" in parity:
        print(f"parity was not run: {parity['not_run']}")
        return
    table = Table(title="Against the float32 CPU model of this project, teacher-forced")
    for heading in ("prompt", "positions", "max_rel", "same token", "near ties", "others"):
        table.add_column(heading, justify="left" if heading == "prompt" else "right")
    for row in parity["prompts"]:
        figures = (row["positions"], _relative(row["max_rel"]), row["matches"], row["near_ties"], row["mismatches"])
        table.add_row(row["prompt"], *map(str, figures))
    console.print(table)
    verdict = "passed" if parity["passed"] else "FAILED"
    print(f"{verdict}: {parity['compared']}; max_rel {_relative(parity['max_rel'])}, ", end="")
    print(f"tolerance {parity['tolerance']:.0e}")


def _speed_table(speed: dict[str, Any]) -> Table:
    table = Table(title=f"Median of {speed['repeat']} rounds (smallest to largest), {speed['new_tokens']} decode steps")
    for heading in ("", "prompt", "rows", "bucket", "ms", "tokens/s"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, rows in (("first token", speed["ttft"]), ("each further token", speed["tpot"])):
        for row in rows:
            table.add_row(
                name,
                str(row["prompt_tokens"]),
                str(row.get("rows", 1)),
                " ".join(map(str, row["buckets"])),
                f"{row['median_ms']:.2f} ({row['min_ms']:.2f} to {row['max_ms']:.2f})",
                f"{row['tokens_per_second']:,.1f}",
            )
    return table


def _weights(report: dict[str, Any]) -> list[int]:
    return list(report["memory"]["weight_bytes"].values())


def _shown(fact: dict[str, Any], form: Callable[[Any], str] = str) -> str:
    return f"unknown: {fact['reason']}" if fact["value"] is None else form(fact["value"])


def _device_gb(cores: list[dict[str, Any]]) -> str:
    return f"{_gb(sum(core['bytes'] for core in cores))} on {len(cores)} cores"


def _gb(size: int) -> str:
    return f"{size / 1e9:,.3f} GB"


def _relative(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def main() -> int:
    return command.run(hardware_report)


if __name__ == "__main__":
    raise SystemExit(main())
