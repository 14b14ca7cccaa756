"""Generates text from an artifact, on this machine's CPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from nxdi_qwen.compile.artifact import TOKENIZER, open_artifact
from nxdi_qwen.compile.cpu import load_cpu
from nxdi_qwen.compile.engine import Completion, Engine
from nxdi_qwen.compile.sampling import SamplingParams
from nxdi_qwen.compile.slot_runner import check_prompt
from nxdi_qwen.compile.text import TextCodec
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.scripts import command


def build_parser() -> command.Parser:
    parser = command.Parser(prog="nxdi-qwen-generate", description=__doc__)
    parser.add_argument("--artifacts", type=Path, required=True, metavar="DIR", help="what neuron-compile wrote")
    prompt = parser.add_argument_group("prompts (each may repeat; all run together)")
    prompt.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="plain text, continued")
    prompt.add_argument(
        "--chat", action="append", default=[], metavar="TEXT", help="a user's message, through the chat template"
    )
    prompt.add_argument("--ids", action="append", default=[], type=command.integers, metavar="1,2,3", help="token ids")
    chat = parser.add_argument_group("chat")
    chat.add_argument("--system", metavar="TEXT", help="a system message before the user's")
    chat.add_argument(
        "--thinking", choices=["on", "off"], help="the template's enable_thinking; default: the template's own"
    )
    chat.add_argument(
        "--template-arguments", type=_json_object, default={}, metavar="JSON", help="further arguments of the template"
    )
    sampling = parser.add_argument_group("sampling (defaults: the checkpoint's generation_config.json)")
    for name, kind in _SAMPLING.items():
        sampling.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=kind.__name__.upper())
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="a stop string; may repeat")
    sampling.add_argument("--ignore-eos", action="store_true", default=None, help="go on after an end token")
    parser.add_argument("--verify", action="store_true", help="check the weights against their hash before loading")
    parser.add_argument("--json", action="store_true", help="print one JSON object when everything is done")
    return parser


_SAMPLING: dict[str, type] = {
    "max_new_tokens": int, "temperature": float, "top_k": int, "top_p": float, "min_p": float,
    "repetition_penalty": float, "presence_penalty": float, "frequency_penalty": float, "logprobs": int, "seed": int,
}  # fmt: skip


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def generate(arguments: list[str] | None) -> int:
    options = build_parser().parse_args(arguments)
    if not (options.prompt or options.chat or options.ids):
        raise InputError("no prompt: give --prompt, --chat or --ids")
    manifest = open_artifact(options.artifacts, options.verify)
    codec = TextCodec.from_folder(options.artifacts / TOKENIZER) if manifest.text_files else None
    prompts = [*_text_prompts(options, codec), *options.ids]
    for ids in prompts:
        check_prompt(ids, manifest.model.vocab_size, manifest.max_length)
    with command.progress_bars() as progress:
        executor = load_cpu(options.artifacts, manifest, progress)
    engine = Engine(executor, codec, dataclasses.asdict(manifest.generation))
    overrides = {name: getattr(options, name) for name in _SAMPLING}
    params = engine.params(
        **overrides, stop=tuple(options.stop) if options.stop else None, ignore_eos=options.ignore_eos
    )
    completions = _run(engine, prompts, params, show=not options.json)
    if options.json:
        print(json.dumps({"artifact": str(options.artifacts), "completions": [done.to_dict() for done in completions]}))
    return 0


def _text_prompts(options: Any, codec: TextCodec | None) -> list[list[int]]:
    """The ids of --prompt and --chat."""
    if not (options.prompt or options.chat):
        return []
    if codec is None:
        raise InputError(
            f"{options.artifacts} has no tokenizer: give --ids, or compile a folder that has tokenizer.json"
        )
    arguments = dict(options.template_arguments)
    if options.thinking is not None:
        arguments["enable_thinking"] = options.thinking == "on"
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    chats = [
        codec.encode_chat([*system, {"role": "user", "content": text}], add_generation_prompt=True, **arguments)
        for text in options.chat
    ]
    return [codec.encode(text) for text in options.prompt] + chats


def _run(engine: Engine, prompts: list[list[int]], params: SamplingParams, show: bool) -> list[Completion]:
    """Runs all prompts; a single one is shown as it comes, several when each is done."""
    numbers = [engine.submit(ids, params) for ids in prompts]
    done: dict[int, Completion] = {}
    for event in engine.stream():
        if show and len(prompts) == 1:
            print(event.text if engine.codec else f"{event.token.id} ", end="", flush=True)
        if event.completion.finish_reason is not None:
            done[event.request] = event.completion
            if show:
                _show(event.completion, len(prompts) == 1)
    return [done[number] for number in numbers]


def _show(completion: Completion, shown_already: bool) -> None:
    if shown_already:
        print()
    else:
        text = completion.text if completion.text is not None else " ".join(map(str, completion.token_ids))
        print(f"[{completion.request}] {text}")
    if completion.tokens[0].logprob is not None:
        for token in completion.tokens:
            print(f"    {token.id} logprob {token.logprob:.4f}  top {token.top}")


def main() -> int:
    return command.run(generate)


if __name__ == "__main__":
    raise SystemExit(main())
