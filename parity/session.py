"""A whole comparison: what was asked, checked before anything is computed, run, judged and explained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nxdi_qwen.compile.executor import Executor
from nxdi_qwen.compile.source import Progress, no_progress
from nxdi_qwen.compile.text import TextCodec
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.parity.bands import TOP_K
from nxdi_qwen.parity.compare import compare_runs, comparison, explain
from nxdi_qwen.parity.drill import Runs
from nxdi_qwen.parity.prompts import SETS, TEXT_SET, built_in_prompts, read_prompts
from nxdi_qwen.parity.records import Prompt
from nxdi_qwen.parity.result import Comparison, Drill, PromptResult
from nxdi_qwen.parity.runs import STEPS, Sides, run_all, runs_of
from nxdi_qwen.parity.store import DEFAULT_LIMIT, Store, default_folder
from nxdi_qwen.parity.targets.choose import Kind, Opener
from nxdi_qwen.parity.targets.huggingface import HuggingFaceSide
from nxdi_qwen.parity.targets.side import Side
from nxdi_qwen.parity.targets.stored import StoredRuns, StoredSide

NONE = "none"
# Prompts to look for the reason with: the runs of all sides are in memory then.
_LONGEST_EXPLAINED = 200


@dataclass(frozen=True)
class Asked:
    """What a comparison is of. Sides in the forms of `targets.choose`.

    model: the checkpoint's folder, which every side needs but servers and stored results.
    reference: "none" only with `save`.
    sixteen_bit: of the three-way verdict; None: Hugging Face in bfloat16 for a target in bfloat16 beside Hugging Face,
        "none": none.
    dtype: of the target, where that does not say it.
    prompts: a file's name, names of built-in sets with commas between them, or the prompts; None: those of a stored
        side, or all built-in ones that fit.
    tolerance: of the two-way verdict, for all logits; None: that of the dtype.
    save: a folder that the target's runs are written to.
    """

    model: Path | None
    target: str = "eager"
    reference: str = "huggingface"
    sixteen_bit: str | None = None
    dtype: str | None = None
    prompts: str | Sequence[Prompt] | None = None
    tolerance: float | None = None
    cache: Path | None = None
    cache_limit: int = DEFAULT_LIMIT
    save: Path | None = None


@dataclass(frozen=True)
class Prepared:
    """Checked and ready to run; `reference` None: the target alone, to be saved."""

    asked: Asked
    reference: Side | None
    target: Side
    sixteen_bit: Side | None
    prompts: list[Prompt]
    store: Store
    save: StoredRuns | None


def run_session(
    asked: Asked,
    progress: Progress = no_progress,
    ranks: int = 1,
    leading: Callable[[Executor], Executor] = lambda executor: executor,
) -> Comparison | None:
    """The comparison; None where there is no reference. `ranks` and `leading` as in `Opener`.

    Raises InputError, before anything heavy is computed, for what cannot be compared.
    """
    ready = prepare(asked, progress, ranks, leading)
    if ready.reference is None:
        for done, prompt in enumerate(ready.prompts):
            progress("target", done, len(ready.prompts))
            assert ready.save is not None
            ready.save.add(ready.target.run(prompt, None, STEPS))
        progress("target", len(ready.prompts), len(ready.prompts))
        return None
    sides = Sides(ready.reference, ready.target, ready.sixteen_bit)
    tolerances = None if asked.tolerance is None else dict.fromkeys(TOP_K, asked.tolerance)

    def judge(runs: Runs) -> PromptResult:
        if ready.save is not None:
            ready.save.add(runs.target)
        dtype = ready.target.description.dtype
        return compare_runs(runs.reference, runs.target, runs.sixteen_bit, ready.target.config, dtype, tolerances)

    results = run_all(sides, ready.prompts, ready.store, judge, progress)
    found = _explain(sides, ready, results, progress)
    ready.store.trim()
    return comparison(sides.reference, sides.target, sides.sixteen_bit, results, found)


def prepare(asked: Asked, progress: Progress, ranks: int, leading: Callable[[Executor], Executor]) -> Prepared:
    """Everything that is checked before anything is computed."""
    if asked.tolerance is not None and not asked.tolerance >= 0:
        raise InputError(f"tolerance {asked.tolerance} is not possible: give a number from 0")
    if asked.reference == NONE and asked.save is None:
        raise InputError("without a reference nothing is compared: give --save DIR as well")
    target_kind = Kind.parse(asked.target, asked.dtype)
    reference_kind = None if asked.reference == NONE else Kind.parse(asked.reference)
    if reference_kind is not None and reference_kind.name == "server":
        raise InputError("a server tells too little for a reference: give it as --target")
    folder = asked.cache or default_folder()
    opener = Opener(asked.model, folder, progress, ranks, leading)
    if asked.model is not None:
        opener.source  # noqa: B018, what is wrong with the checkpoint comes first
    written = _written_prompts(asked.prompts, asked.model)
    reference = opener.open(reference_kind) if reference_kind is not None and reference_kind.name == "stored" else None
    target = opener.open(target_kind, reference.config if reference else None)
    if reference_kind is not None and reference is None:
        reference = opener.open(reference_kind, target.config)
    sixteen_bit = _sixteen_bit(asked, reference, target, opener)
    sides = [side for side in (target, reference, sixteen_bit) if side is not None]
    if any(side.config != target.config for side in sides):
        raise InputError("target and reference are of different models: compare two sides of one checkpoint")
    prompts = _prompts(asked.prompts, written, sides, opener)
    for side in sides:
        side.expect(prompts, STEPS)
    store = Store(folder, asked.cache_limit)
    opener.identify(*sides)
    save = None if asked.save is None else StoredRuns(asked.save, target.description, target.config)
    return Prepared(asked, reference, target, sixteen_bit, prompts, store, save)


def _sixteen_bit(asked: Asked, reference: Side | None, target: Side, opener: Opener) -> Side | None:
    if asked.sixteen_bit == NONE or reference is None:
        return None
    if asked.sixteen_bit is not None:
        return opener.open(Kind.parse(asked.sixteen_bit))
    usual = isinstance(reference, HuggingFaceSide) and reference.description.dtype == "float32"
    if usual and target.description.dtype == "bfloat16":
        return opener.open(Kind("huggingface", "", "bfloat16"))
    return None


def _written_prompts(asked: str | Sequence[Prompt] | None, model: Path | None) -> list[Prompt] | None:
    """Those of a file or of the caller; None for built-in or stored ones."""
    if asked is None:
        return None
    if not isinstance(asked, str):
        return list(asked)
    if Path(asked).exists():
        return read_prompts(Path(asked), model)
    if not set(asked.split(",")) <= {*SETS, TEXT_SET}:
        sets = ", ".join((*SETS, TEXT_SET))
        raise InputError(f"no prompts file {asked}, and no built-in sets of these names: there are {sets}")
    return None


def _prompts(
    asked: str | Sequence[Prompt] | None, written: list[Prompt] | None, sides: Sequence[Side], opener: Opener
) -> list[Prompt]:
    if written is not None:
        return written
    stored = next((side for side in sides if isinstance(side, StoredSide)), None)
    if asked is None and stored is not None:
        return stored.prompts
    codec = None
    if opener.folder is not None and opener.source.text_files:
        codec = TextCodec.from_folder(opener.folder)
    room = min(side.room for side in sides) - STEPS
    return built_in_prompts(sides[0].config, room, codec, tuple(asked.split(",")) if isinstance(asked, str) else ())


def _explain(sides: Sides, ready: Prepared, results: Sequence[PromptResult], progress: Progress) -> Drill | None:
    """Looks for the reason with the shortest and the worst of the prompts that failed."""
    failed = [(prompt, result) for prompt, result in zip(ready.prompts, results, strict=True) if not result.passed]
    if not failed or not isinstance(sides.reference, HuggingFaceSide):
        return None
    failed.sort(key=lambda pair: len(pair[0].ids))
    short = [pair for pair in failed if len(pair[0].ids) <= _LONGEST_EXPLAINED] or failed[:1]
    worst = max(
        short, key=lambda pair: max((value for value in pair[1].positions_rel if value is not None), default=0.0)
    )
    chosen = {prompt.ids: prompt for prompt, _ in (short[0], worst)}
    all_runs = [runs_of(sides, prompt, ready.store) for prompt in chosen.values()]
    twin = sides.target.twin()
    if twin is None:
        return explain(sides.reference, sides.target, sides.sixteen_bit, all_runs, progress)
    with_hidden = []
    for runs in all_runs:
        seen = twin.run(runs.target.prompt, runs.target.forced, STEPS)
        hidden = seen.hidden if runs.target.hidden is None else runs.target.hidden
        target = replace(runs.target, hidden=hidden, experts=seen.experts, router_margins=seen.router_margins)
        with_hidden.append(runs._replace(target=target))
    found = explain(sides.reference, twin, sides.sixteen_bit, with_hidden, progress)
    return replace(found, notes=("looked for in the eager model on the target's weights", *found.notes))
