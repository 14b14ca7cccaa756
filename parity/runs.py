"""The runs of all sides, prompt by prompt: the references first, kept on disk, so that their models are gone before the
target's is loaded and an interrupted comparison goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from nxdi_qwen.compile.source import Progress
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.parity.drill import Runs
from nxdi_qwen.parity.records import Prompt, Run
from nxdi_qwen.parity.store import Store, run_key
from nxdi_qwen.parity.targets.huggingface import HuggingFaceSide
from nxdi_qwen.parity.targets.side import Side
from nxdi_qwen.parity.targets.stored import StoredSide

T = TypeVar("T")
STEPS = 16


@dataclass(frozen=True)
class Sides:
    """What is compared, along the reference's own greedy tokens, or those that a stored side was run along."""

    reference: Side
    target: Side
    sixteen_bit: Side | None

    @property
    def all(self) -> list[Side]:
        return [self.reference, self.target, *([self.sixteen_bit] if self.sixteen_bit else [])]

    def forced(self, prompt: Prompt) -> tuple[int, ...] | None:
        """The tokens that a stored side has behind a prompt; None where the reference chooses.

        Raises InputError for two stored sides with different ones.
        """
        known = {side.forced(prompt) for side in self.all if isinstance(side, StoredSide)}
        if len(known) > 1:
            raise InputError(
                f"the stored results have different tokens behind prompt {prompt.name}: save one of them with the "
                "other as --reference"
            )
        return known.pop() if known else None


def run_all(
    sides: Sides, prompts: Sequence[Prompt], store: Store, judge: Callable[[Runs], T], progress: Progress
) -> list[T]:
    """What `judge` makes of each prompt's runs, one prompt in memory at a time.

    `progress` stages: "cache" (prompts checked), "reference", "16-bit reference", "target" (prompts run).
    """
    forced: dict[Prompt, tuple[int, ...]] = {}
    _check_kept(sides, prompts, store, progress)
    if isinstance(sides.reference, HuggingFaceSide):
        for done, prompt in enumerate(prompts):
            progress("reference", done, len(prompts))
            forced[prompt] = _keep(sides.reference, prompt, sides.forced(prompt), store)
        progress("reference", len(prompts), len(prompts))
        sides.reference.release()
    if isinstance(sides.sixteen_bit, HuggingFaceSide) and forced:
        for done, prompt in enumerate(prompts):
            progress("16-bit reference", done, len(prompts))
            _keep(sides.sixteen_bit, prompt, forced[prompt], store)
        progress("16-bit reference", len(prompts), len(prompts))
        sides.sixteen_bit.release()
    results = []
    for done, prompt in enumerate(prompts):
        progress("target", done, len(prompts))
        results.append(judge(runs_of(sides, prompt, store)))
    progress("target", len(prompts), len(prompts))
    return results


def _check_kept(sides: Sides, prompts: Sequence[Prompt], store: Store, progress: Progress) -> None:
    """Finds damaged files before anything is computed."""
    if not isinstance(sides.reference, HuggingFaceSide):
        return
    for done, prompt in enumerate(prompts, start=1):
        header = store.header(_key(sides.reference, prompt, sides.forced(prompt), store))
        if header is not None and isinstance(sides.sixteen_bit, HuggingFaceSide):
            store.header(_key(sides.sixteen_bit, prompt, header.forced, store))
        progress("cache", done, len(prompts))


def _keep(side: Side, prompt: Prompt, forced: Sequence[int] | None, store: Store) -> tuple[int, ...]:
    """Puts a run into the store unless it is there; returns the tokens behind the prompt."""
    header = store.header(_key(side, prompt, forced, store))
    return header.forced if header is not None else _run(side, prompt, forced, store).forced


def runs_of(sides: Sides, prompt: Prompt, store: Store) -> Runs:
    """What all sides yield for one prompt along the same tokens."""
    reference = _run(sides.reference, prompt, sides.forced(prompt), store)
    sixteen_bit = None if sides.sixteen_bit is None else _run(sides.sixteen_bit, prompt, reference.forced, store)
    return Runs(reference, sides.target.run(prompt, reference.forced, STEPS), sixteen_bit)


def _run(side: Side, prompt: Prompt, forced: Sequence[int] | None, store: Store) -> Run:
    """From the store where it is there. Only Hugging Face's runs are kept: this project's code changes."""
    if not isinstance(side, HuggingFaceSide):
        return side.run(prompt, forced, STEPS)
    key = _key(side, prompt, forced, store)
    run = store.get(key, prompt)
    if run is None:
        run = side.run(prompt, forced, STEPS)
        store.put(key, run, side.description, side.config)
    return run


def _key(side: Side, prompt: Prompt, forced: Sequence[int] | None, store: Store) -> str:
    """Of the run along `forced`; of the greedy one where that took these very tokens."""
    greedy = run_key(side.description, prompt, None, STEPS)
    if forced is None or ((header := store.header(greedy)) is not None and header.forced == tuple(forced)):
        return greedy
    return run_key(side.description, prompt, forced, STEPS)
