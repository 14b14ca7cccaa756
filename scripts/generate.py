"""Generates text from an artifact, on this machine's CPU."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from nxdi_qwen.compile.artifact import open_artifact
from nxdi_qwen.compile.cpu import load_cpu
from nxdi_qwen.compile.distributed import check_ranks, follow, leading, process_group
from nxdi_qwen.compile.engine import Completion, Engine
from nxdi_qwen.compile.manifest import Manifest
from nxdi_qwen.compile.sampling import BrokenModelError, SamplingParams
from nxdi_qwen.compile.slot_runner import check_prompt
from nxdi_qwen.compile.text import TOKENIZER_FILE, TextCodec
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.scripts import command


class _Text(str):
    """What --prompt gave."""


class _Chat(str):
    """What --chat gave."""


def build_parser() -> command.Parser:
    parser = command.Parser(prog="nxdi-qwen-generate", description=__doc__)
    parser.add_argument("--artifacts", type=Path, required=True, metavar="DIR", help="what neuron-compile wrote")
    prompt = parser.add_argument_group("prompts (each may repeat; all run together, in this order)")
    for flag, kind, metavar, explanation in (
        ("--prompt", _Text, "TEXT", "plain text, continued"),
        ("--chat", _Chat, "TEXT", "a user's message, through the chat template"),
        ("--ids", command.integers, "1,2,3", "token ids"),
    ):
        prompt.add_argument(
            flag, dest="prompts", action="append", default=[], type=kind, metavar=metavar, help=explanation
        )
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
        flag, metavar = f"--{name.replace('_', '-')}", kind.__name__.upper()
        sampling.add_argument(flag, type=kind, metavar=metavar, help=_EXPLANATIONS[name])
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="a stop string; may repeat")
    sampling.add_argument("--ignore-eos", action="store_true", default=None, help="go on after an end token")
    parser.add_argument("--verify", action="store_true", help="check the weights against their hash before loading")
    parser.add_argument("--json", action="store_true", help="print one JSON object when everything is done")
    return parser


_SAMPLING: dict[str, type] = {
    "max_new_tokens": int, "temperature": float, "top_k": int, "top_p": float, "min_p": float,
    "repetition_penalty": float, "presence_penalty": float, "frequency_penalty": float, "logprobs": int, "seed": int,
}  # fmt: skip


_EXPLANATIONS = {
    "max_new_tokens": "at most so many (default 128, whatever the checkpoint says)",
    "temperature": "0: greedy; up to 100. A checkpoint that does not sample stays greedy until this is given",
    "top_k": "of the k most likely tokens; 0: of all",
    "top_p": "of the most likely tokens that together have this probability, above 0 to 1",
    "min_p": "of tokens with at least this part of the most likely one's probability, 0 to 1",
    "repetition_penalty": "divides scores of tokens seen in prompt or output, 0.01 to 100; 1: off",
    "presence_penalty": "taken from scores of tokens in the output, -2 to 2",
    "frequency_penalty": "the same for each time that they stand there, -2 to 2",
    "logprobs": "also print log probabilities, of the model itself, of the token and of the n most likely ones",
    "seed": "makes the draws repeatable",
}


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def generate(arguments: list[str] | None) -> int:
    options = build_parser().parse_args(arguments)
    if not options.prompts:
        raise InputError("no prompt: give --prompt, --chat or --ids")
    chat_options = {
        "--system": options.system,
        "--thinking": options.thinking,
        "--template-arguments": options.template_arguments,
    }
    if not any(isinstance(prompt, _Chat) for prompt in options.prompts):
        for flag, value in chat_options.items():
            if value:
                raise InputError(f"{flag} is for the chat template: give --chat, or leave it out")
    with process_group() as (rank, ranks):
        return _generate(options, rank, ranks)


def _generate(options: Any, rank: int, ranks: int) -> int:
    manifest = open_artifact(options.artifacts, options.verify)
    check_ranks(manifest, ranks)
    codec = _codec(options, manifest)
    prompts = [_prompt_ids(prompt, options, codec) for prompt in options.prompts]
    for ids in prompts:
        check_prompt(ids, manifest.model.vocab_size, manifest.max_length)
    params = SamplingParams.from_generation_config(
        dataclasses.asdict(manifest.generation),
        **{name: getattr(options, name) for name in _SAMPLING},
        stop=tuple(options.stop) if options.stop else None,
        ignore_eos=options.ignore_eos,
    )
    if rank:
        follow(load_cpu(options.artifacts, manifest, rank))
        return 0
    with command.progress_bars() as progress:
        own = load_cpu(options.artifacts, manifest, rank, progress)
    with leading(own, ranks) as executor:
        try:
            completions = _run(Engine(executor, codec), prompts, params, show=not options.json)
        except BrokenModelError as error:
            raise InputError(f"{options.artifacts} is broken: {error}; logit-diff finds the layer") from error
    if options.json:
        print(json.dumps({"artifact": str(options.artifacts), "completions": [done.to_dict() for done in completions]}))
    return 0


def _codec(options: Any, manifest: Manifest) -> TextCodec | None:
    """The artifact's tokenizer; token ids run without one, also where its files cannot be used."""
    needed = options.stop or any(isinstance(prompt, str) for prompt in options.prompts)
    if TOKENIZER_FILE not in manifest.checkpoint_files:
        if needed:
            raise InputError(
                f"{options.artifacts} has no tokenizer: give only --ids, or compile a folder that has tokenizer.json"
            )
        return None
    try:
        return TextCodec.from_folder(options.artifacts)
    except InputError:
        if needed:
            raise
        return None


def _prompt_ids(prompt: _Text | _Chat | tuple[int, ...], options: Any, codec: TextCodec | None) -> list[int]:
    if isinstance(prompt, tuple):
        return list(prompt)
    assert codec is not None
    if isinstance(prompt, _Text):
        return codec.encode(prompt)
    arguments = dict(options.template_arguments)
    if options.thinking is not None:
        arguments["enable_thinking"] = options.thinking == "on"
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return codec.encode_chat([*system, {"role": "user", "content": str(prompt)}], **arguments)


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
