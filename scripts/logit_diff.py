"""Compares this port's logits with Hugging Face's, teacher-forced: every position of the prompts, then decode steps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from nxdi_qwen.compile.artifact import open_artifact
from nxdi_qwen.compile.buckets import Buckets
from nxdi_qwen.compile.cpu import load_cpu
from nxdi_qwen.compile.distributed import check_ranks, follow, leading, process_group
from nxdi_qwen.compile.executor import EagerExecutor, Executor
from nxdi_qwen.compile.slot_runner import SlotRunner, check_prompt
from nxdi_qwen.compile.source import DTYPES, ModelSource, Progress
from nxdi_qwen.compile.text import TextCodec
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.scripts import command
from nxdi_qwen.scripts.reference import Reference

DECODE_STEPS = 16
EAGER_SLOTS = 4
# Of the largest logit. float32: above the rounding of deep models and of the reference itself (1.6e-5 between its own
# two forms on repeated tokens), below what a wrong weight does. bfloat16: rounding alone reaches a few percent.
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}
# In 16 bit, experts at a near tie are chosen differently, which moves single positions by tens of percent.
MOE_BFLOAT16_TOLERANCE = 0.5
ABOVE_TOLERANCE = 1


@dataclass(frozen=True)
class Prompt:
    """`name` says where the prompt comes from."""

    name: str
    ids: list[int]


@dataclass(frozen=True)
class Difference:
    """One phase ("prefill" or "decode") of one prompt against the reference.

    `max_rel` is `max_abs` over the largest reference logit of the phase; the lists have one entry a position, `rel`
    being relative to the same logit.
    """

    prompt: str
    phase: str
    tokens: int
    max_abs: float
    max_rel: float
    argmax_match: float
    positions_rel: list[float]
    positions_match: list[bool]


def build_parser() -> command.Parser:
    parser = command.Parser(prog="logit-diff", description=__doc__)
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="checkpoint folder, read by Hugging Face too"
    )
    parser.add_argument("--artifacts", type=Path, metavar="DIR", help="compare this artifact; default: the eager model")
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help='lines {"text": ...} or {"ids": [...]}')
    parser.add_argument("--dtype", choices=list(DTYPES), help="of this port; the reference is always float32")
    parser.add_argument("--tolerance", type=float, help="largest max_rel that passes; default by dtype")
    parser.add_argument("--json", action="store_true", help="print everything, per position, as JSON")
    return parser


def logit_diff(arguments: list[str] | None) -> int:
    options = build_parser().parse_args(arguments)
    if options.tolerance is not None and not options.tolerance >= 0:
        raise InputError(f"tolerance {options.tolerance} is not possible: give a number from 0")
    with process_group() as (rank, ranks):
        if ranks > 1 and options.artifacts is None:
            raise InputError(f"{ranks} processes compare an artifact only: give --artifacts, or start one process")
        if rank:
            manifest = open_artifact(options.artifacts)
            check_ranks(manifest, ranks)
            follow(load_cpu(options.artifacts, manifest, rank))
            return 0
        return _compare_and_print(options, ranks)


def _compare_and_print(options: Any, ranks: int) -> int:
    source = ModelSource.from_checkpoint(options.model)
    prompts = (
        read_prompts(options.prompts, options.model) if options.prompts else built_in_prompts(source.config.vocab_size)
    )
    with command.progress_bars() as progress:
        own, dtype = _target(options, source, prompts, ranks, progress)
        tolerance = _default_tolerance(dtype, source) if options.tolerance is None else options.tolerance
        with leading(own, ranks) as executor:
            reference = Reference(options.model)
            differences = list(compare(executor, reference, prompts, progress))
    worst = max(difference.max_rel for difference in differences)
    passed = worst <= tolerance
    summary = {
        "model": str(options.model),
        "target": str(options.artifacts) if options.artifacts else "eager",
        "dtype": dtype,
        "reference": f"transformers {reference.version}, float32",
        "tolerance": tolerance,
        "max_abs": max(difference.max_abs for difference in differences),
        "max_rel": worst,
        "argmax_match": _mean([match for difference in differences for match in difference.positions_match]),
        "passed": passed,
    }
    if options.json:
        print(json.dumps({**summary, "differences": [asdict(difference) for difference in differences]}))
    else:
        _print(summary, differences)
    return 0 if passed else ABOVE_TOLERANCE


def read_prompts(path: Path, model: Path) -> list[Prompt]:
    """Prompts from JSON lines. Raises InputError naming the line for anything else."""
    if not path.is_file():
        raise InputError(f"no prompts file {path}")
    prompts, codec = [], None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            entry = json.loads(line)
        except ValueError:
            raise InputError(f"{where} is not JSON") from None
        if isinstance(entry, dict) and entry.keys() == {"text"} and isinstance(entry["text"], str):
            codec = codec or TextCodec.from_folder(model)
            ids = codec.encode(entry["text"])
        elif isinstance(entry, dict) and entry.keys() == {"ids"} and _is_ids(entry["ids"]):
            ids = entry["ids"]
        else:
            raise InputError(f'{where} is neither {{"text": "..."}} nor {{"ids": [1, 2, 3]}}')
        prompts.append(Prompt(f"line {number}", ids))
    if not prompts:
        raise InputError(f"{path} has no prompts")
    return prompts


def built_in_prompts(vocab_size: int) -> list[Prompt]:
    """Lengths around the traps (one token, shorter than the convolution, around a chunk), random ids, and one
    token repeated.
    """
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for length in (1, 3, 64, 65, 130):
        ids = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
        prompts.append(Prompt(f"{length} random", ids))
    return [*prompts, Prompt("100 repeated", [prompts[0].ids[0]] * 100)]


def compare(
    executor: Executor, reference: Reference, prompts: list[Prompt], progress: Progress
) -> Iterator[Difference]:
    """Runs as many prompts side by side as there are slots, each forced along the reference's own greedy tokens."""
    runner = SlotRunner(executor)
    slots = executor.description.slots
    for first in range(0, len(prompts), slots):
        group = prompts[first : first + slots]
        expected, prefilled = [], []
        for slot, prompt in enumerate(group):
            progress("prompts", first + slot, len(prompts))
            expected.append(reference.run(prompt.ids, DECODE_STEPS))
            prefilled.append(runner.prefill_all_logits(slot, prompt.ids))
        decoded: list[list[Tensor]] = [[] for _ in group]
        for step in range(DECODE_STEPS):
            logits = runner.decode({slot: expected[slot][1][step] for slot in range(len(group))})
            for slot, collected in enumerate(decoded):
                collected.append(logits[slot])
        for slot, prompt in enumerate(group):
            yield _difference(prompt, "prefill", prefilled[slot], expected[slot][0])
            yield _difference(prompt, "decode", torch.stack(decoded[slot]), expected[slot][2])
    progress("prompts", len(prompts), len(prompts))


def _target(
    options: Any, source: ModelSource, prompts: list[Prompt], ranks: int, progress: Progress
) -> tuple[Executor, str]:
    """The executor to compare, and its dtype; everything is checked before anything is loaded."""
    room = source.config.max_position_embeddings
    if options.artifacts is not None:
        manifest = open_artifact(options.artifacts)
        check_ranks(manifest, ranks)
        if manifest.source["fingerprint"] != source.fingerprint:
            raise InputError(
                f"{options.artifacts} was compiled from another checkpoint than {options.model}; compile it again"
            )
        if options.dtype not in (None, manifest.dtype):
            raise InputError(f"{options.artifacts} is {manifest.dtype}, not {options.dtype}: leave --dtype out")
        room = manifest.max_length
    for prompt in prompts:
        try:
            check_prompt(prompt.ids, source.config.vocab_size, room - DECODE_STEPS)
        except InputError as error:
            raise InputError(f"prompt {prompt.name}: {error} ({DECODE_STEPS} decode steps follow)") from None
    if options.artifacts is not None:
        return load_cpu(options.artifacts, manifest, progress=progress), manifest.dtype
    dtype = options.dtype or "float32"
    longest = max(len(prompt.ids) for prompt in prompts) + DECODE_STEPS
    model = source.load(DTYPES[dtype], progress=progress)
    return EagerExecutor(model, min(EAGER_SLOTS, len(prompts)), longest, Buckets.choose(longest)), dtype


def _default_tolerance(dtype: str, source: ModelSource) -> float:
    if dtype == "bfloat16" and source.config.num_experts:
        return MOE_BFLOAT16_TOLERANCE
    return TOLERANCES[dtype]


def _difference(prompt: Prompt, phase: str, actual: Tensor, expected: Tensor) -> Difference:
    scale = expected.abs().max()
    # NaN compares false with everything: as an infinite difference it fails and is seen.
    error = torch.nan_to_num((actual - expected).abs().amax(dim=-1), nan=math.inf)
    match = actual.argmax(dim=-1) == expected.argmax(dim=-1)
    return Difference(
        prompt=prompt.name,
        phase=phase,
        tokens=expected.shape[0],
        max_abs=error.max().item(),
        max_rel=(error.max() / scale).item(),
        argmax_match=match.float().mean().item(),
        positions_rel=(error / scale).tolist(),
        positions_match=match.tolist(),
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _mean(matches: list[bool]) -> float:
    return sum(matches) / len(matches)


def _print(summary: dict[str, Any], differences: list[Difference]) -> None:
    table = Table(title=f"{summary['target']} ({summary['dtype']}) against {summary['reference']}")
    for heading in ("prompt", "phase", "tokens", "max_abs", "max_rel", "argmax_match"):
        table.add_column(heading, justify="left" if heading in ("prompt", "phase") else "right")
    for row in differences:
        table.add_row(
            row.prompt,
            row.phase,
            str(row.tokens),
            f"{row.max_abs:.2e}",
            f"{row.max_rel:.2e}",
            f"{row.argmax_match:.1%}",
        )
    Console().print(table)
    verdict = "passed" if summary["passed"] else "FAILED"
    print(f"{verdict}: max_rel {summary['max_rel']:.2e}, tolerance {summary['tolerance']:.0e}")


def main() -> int:
    return command.run(logit_diff)


if __name__ == "__main__":
    raise SystemExit(main())
