"""Where a target parts from the reference: the first layer and position beyond rounding, confirmed by that layer alone.

Errors accumulate over layers, and later layers make earlier faults larger. So a layer is at fault only if, with its
inputs taken from the reference, it yields something else (`bench`). The run as a whole only says where to look first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from nxdi_qwen.parity.alone import Difference
from nxdi_qwen.parity.bench import LayerBench
from nxdi_qwen.parity.causes import UNKNOWN, find_cause
from nxdi_qwen.parity.growth import Growth
from nxdi_qwen.parity.mistakes.base import NORM
from nxdi_qwen.parity.outer import check_embedding, check_head
from nxdi_qwen.parity.records import Run, Target
from nxdi_qwen.parity.result import Cause, Drill, Place


class Runs(NamedTuple):
    """One prompt on all sides, forced along the same tokens."""

    reference: Run
    target: Run
    sixteen_bit: Run | None


Progress = Callable[[str, int, int], None]


def drill(
    reference: Target, target: Target, sixteen_bit: Target | None, runs: Sequence[Runs], progress: Progress
) -> Drill:
    """Looks for the fault of a target whose runs are given; the reference's must have hidden states.

    First the layer where the runs part; if that one is right alone, all layers in turn, in situations (padding, cut
    prompts, reused slots, idle rows, images) in which the runs perhaps never were.
    """
    config, dtype = reference.config, target.description.dtype
    notes = []
    if any(run.reference.hidden is None for run in runs):
        return Drill(None, None, ("the reference has no hidden states: nothing can be looked for",))
    for own in runs:
        place = check_embedding(own.reference, own.target, dtype)
        if place is not None:
            return Drill(place, Cause(UNKNOWN, "the embedding's rows are not the reference's", None), ())

    growths = [Growth.of(own.reference, own.target, own.sixteen_bit, config, dtype) for own in runs]
    suspects = [growth.first_layer for growth in growths if growth.first_layer is not None]
    suspect = min(suspects) if suspects else None
    order = [index for index in range(config.num_hidden_layers) if index != suspect]
    if suspect is not None:
        notes.append(f"the runs part in layer {suspect}")
        order.insert(0, suspect)
    for done, index in enumerate(order):
        progress("layers", done, len(order))
        bench = LayerBench(reference, target, sixteen_bit, index, [own.reference for own in runs])
        if bench.actual is None:
            notes.append("the target cannot run a layer alone: the layer is where its runs part")
            place = _place_in_runs(runs, growths, suspect)
            cause = None if place is None else Cause(UNKNOWN, "no layer alone to look at", None)
            return Drill(place, cause, tuple(notes))
        found = bench.differences()
        if found:
            place = _place(bench, found, growths, runs)
            return Drill(place, find_cause(bench, found, [(own.reference, own.target) for own in runs]), tuple(notes))
        if index == suspect:
            notes.append(f"layer {index} alone is right, so that all layers were looked at in turn")
    progress("layers", len(order), len(order))

    weights = reference.outer_weights()
    for own in runs:
        if weights is None or suspect is not None:
            break
        place = check_head(own.target, weights, config, dtype)
        if place is not None:
            # Hidden states may be those of a twin of what gave the logits: then they say nothing about its head.
            seen = target.run(own.target.prompt, own.target.forced, 0)
            if check_head(seen, weights, config, dtype) is None:
                notes.append("the logits do not follow from the hidden states of another target with the same weights")
                return Drill(None, None, tuple(notes))
            return Drill(place, _outer_cause(place), tuple(notes))
    if suspect is not None and all(growth.certain_layer is None for growth in growths):
        notes.append("every layer alone is right: what differs comes from tokens whose experts differ")
        return Drill(None, None, tuple(notes))
    if suspect is not None:
        notes.append("no layer alone shows it: it arises between the layers, or in how the state is kept")
        place = _place_in_runs(runs, growths, suspect)
        return Drill(place, Cause(UNKNOWN, "every layer alone is right", None), tuple(notes))
    return Drill(None, None, (*notes, "every layer alone, the embedding and the head are right"))


def _place(bench: LayerBench, found: Sequence[Difference], growths: Sequence[Growth], runs: Sequence[Runs]) -> Place:
    """From the run where this layer's fault shows there, otherwise from the first situation."""
    first = found[0]
    situation = bench.cases[first.case].name
    position = first.position
    for own, growth in zip(runs, growths, strict=True):
        if growth.first_layer == bench.index and (where := growth.first_position(bench.index)) is not None:
            situation, position = own.reference.prompt.name, where
            break
    error, allowed = first.part.error, first.rounding
    return Place(f"layer {bench.index}", bench.index, position, first.part.tensor, situation, error, allowed)


def _place_in_runs(runs: Sequence[Runs], growths: Sequence[Growth], suspect: int | None) -> Place | None:
    for own, growth in zip(runs, growths, strict=True):
        if suspect is not None and growth.first_layer == suspect:
            position = growth.first_position(suspect)
            tensor, error, allowed = growth.worst_of(suspect)
            return Place(f"layer {suspect}", suspect, position, tensor, own.reference.prompt.name, error, allowed)
    return None


def _outer_cause(place: Place) -> Cause:
    if place.name == "final norm":
        return Cause(NORM, "the logits are the head's product with a vector that is not the normed hidden state", None)
    return Cause(UNKNOWN, f"{place.name}: its weights or its product differ", None)
