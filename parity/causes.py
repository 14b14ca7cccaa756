"""Why a layer is wrong: the mistake that gives what the target gives, or nothing.

A cause is named for specific evidence only: a mistake that, played through on the plain layer, gives the target's
outputs and states to rounding in every case (and no mistake of another cause does); the target's states being another
layer's; experts that are right for some tokens of a batch and not for others; rows of a projection that stand in other
places; experts chosen differently far from any tie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nxdi_qwen.compile.source import DTYPES
from nxdi_qwen.parity.alone import Difference, away_from_ties, beyond, compare_parts
from nxdi_qwen.parity.bench import LayerBench
from nxdi_qwen.parity.layer_run import LayerRun
from nxdi_qwen.parity.mistakes import MISTAKES
from nxdi_qwen.parity.mistakes.base import MIXING, WEIGHTS, Mistake
from nxdi_qwen.parity.mistakes.delta_net import StateInSixteenBits
from nxdi_qwen.parity.records import Run
from nxdi_qwen.parity.result import Cause

UNKNOWN, STATE_ORDER, ROUTER_FLIP = "cause unknown", "state order", "router flip"
# A mistake explains what it brings within this many allowances for rounding (it may make numbers larger, and with them
# their rounding), and down to this share of the difference.
TIMES = {"float32": 10.0, "bfloat16": 2.0}
SHARE = {"float32": 0.05, "bfloat16": 0.5}
# Two intermediate results differ if their relative root mean square does by this many steps of the dtype.
PARTING_STEPS = 100.0
PARTING_STEPS_16 = 4.0
ORDER = (
    "input norm",
    *(f"{letter} projection" for letter in "qkvzba"),
    "q norm",
    "k norm",
    "delta rule output",
    "gated norm",
    "gated attention output",
    "mixer output",
    "post norm",
    "router weights",
    "experts",
    "shared expert gate",
)


def find_cause(bench: LayerBench, found: Sequence[Difference], runs: Sequence[tuple[Run, Run]]) -> Cause:
    """The cause of `found`, the differences of the layer on the bench; `runs`: reference and target, whole models."""
    parting = first_parting(bench)
    named = _state_order(bench.index, runs)
    if named is None and bench.trusted():
        named = _mistake(bench, found) or _from_intermediates(bench, parting)
    if named is None:
        return Cause(UNKNOWN, "no mistake that is known here explains the difference", parting)
    return Cause(*named, parting)


def first_parting(bench: LayerBench) -> str | None:
    """The first intermediate result, in the order of computation, that differs beyond rounding; states and the output
    where all that the target shows agree.
    """
    assert bench.actual is not None
    for name in ORDER:
        error = _parting(bench, name)
        if error is not None and not error <= _parting_bound(bench):
            return name
    differing = {difference.part.tensor for difference in bench.differences()}
    for name in ("conv", "key", "value", "recurrent"):
        if name in differing:
            return f"{name} state"
    return "output" if differing else None


def _parting_bound(bench: LayerBench) -> float:
    eps = torch.finfo(DTYPES[bench.dtype]).eps
    return eps * (PARTING_STEPS if bench.dtype == "float32" else PARTING_STEPS_16)


def _pairs(bench: LayerBench, name: str) -> list[tuple[Tensor, Tensor]]:
    """The target's and the true intermediate result, request by request, at tokens away from routing ties."""
    assert bench.actual is not None
    pairs = []
    for actual, truth, counts in zip(bench.actual, bench.truth, bench.counts, strict=True):
        for mine, theirs, keep in zip(actual.requests, truth.requests, counts, strict=True):
            if name in mine.intermediates and name in theirs.intermediates:
                pairs.append((mine.intermediates[name][keep].double(), theirs.intermediates[name][keep]))
    return pairs


def _parting(bench: LayerBench, name: str) -> float | None:
    """The largest relative error of any request; None where a side does not show it."""
    pairs = [(mine, theirs) for mine, theirs in _pairs(bench, name) if theirs.numel()]
    if not pairs:
        return None
    scale = torch.cat([theirs.flatten() for _, theirs in pairs]).square().mean().sqrt().clamp(min=1e-30)
    errors = [((mine - theirs).square().mean().sqrt() / scale).item() for mine, theirs in pairs]
    return max(errors) if all(error == error for error in errors) else float("inf")


def _state_order(index: int, runs: Sequence[tuple[Run, Run]]) -> tuple[str, str] | None:
    """Whether, after a prompt, the target holds another layer's state in the place of this one's."""
    for reference, target in runs:
        if reference.states is None or target.states is None:
            continue
        for role in ("recurrent", "conv"):
            name = f"layers.{index}.{role}"
            if name not in target.states:
                continue
            own = target.states[name][0].double()
            if _close(own, reference.states[name][0]):
                continue
            for other, states in reference.states.items():
                if other != name and other.endswith(f".{role}") and _close(own, states[0]):
                    return STATE_ORDER, f"after a prompt {name} holds what belongs to {other}"
    return None


def _close(actual: Tensor, expected: Tensor) -> bool:
    if actual.shape != expected.shape:
        return False
    expected = expected.double()
    scale = expected.square().mean().sqrt()
    return bool(scale > 0) and bool((actual - expected).square().mean().sqrt() <= 2e-2 * scale)


def _mistake(bench: LayerBench, found: Sequence[Difference]) -> tuple[str, str] | None:
    """The mistake that explains everything, if those that do agree on the cause."""
    assert bench.plain is not None
    worst = max(found, key=lambda difference: difference.part.error / max(difference.rounding, 1e-30)).case
    explaining: list[tuple[float, type[Mistake]]] = []
    for mistake in MISTAKES:
        if not mistake.possible(bench.plain):
            continue
        layer = mistake(bench.config, bench.index, bench.plain.weights)
        # The worst case alone rules out nearly all.
        if _remaining(bench, found, {worst: layer.run(bench.cases[worst])}, mistake) is None:
            continue
        runs = {number: layer.run(case) for number, case in enumerate(bench.cases)}
        remaining = _remaining(bench, found, runs, mistake)
        if remaining is not None:
            explaining.append((remaining, mistake))
    if len({mistake.cause for _, mistake in explaining}) != 1:
        return None
    _, best = min(explaining, key=lambda pair: pair[0])
    return best.cause, f"{best.what}: this gives the target's results in all {len(bench.cases)} situations"


def _remaining(
    bench: LayerBench, found: Sequence[Difference], runs: Mapping[int, LayerRun], mistake: type[Mistake]
) -> float | None:
    """The share of the differences that a mistake leaves; None where it explains too little. `runs`: by case."""
    assert bench.actual is not None
    numbers = list(runs)
    # Where the mistake moves a token to a tie, its experts say nothing either.
    counts = [
        [
            mine & theirs
            for mine, theirs in zip(bench.counts[n], away_from_ties(run, bench.config, bench.dtype), strict=True)
        ]
        for n, run in runs.items()
    ]
    cases, actual = [bench.cases[n] for n in numbers], [bench.actual[n] for n in numbers]
    rounding, expected = [bench.rounding[n] for n in numbers], list(runs.values())
    if mistake is StateInSixteenBits:
        # Near the middle of two 16-bit values rounding goes either way: no agreement, but only 16-bit values.
        if not _in_sixteen_bits(actual):
            return None
    elif beyond(cases, actual, expected, rounding, counts, bench.dtype, TIMES[bench.dtype]):
        return None
    left = before = 0.0
    for number, mine, theirs, keep in zip(numbers, actual, expected, counts, strict=True):
        parts = compare_parts(mine, theirs, keep)
        for difference in found:
            if difference.case == number:
                left += parts[difference.number].error ** 2
                before += difference.part.error**2
    share = (left / before) ** 0.5
    return share if share <= SHARE[bench.dtype] else None


def _in_sixteen_bits(runs: Sequence[LayerRun]) -> bool:
    """Whether every recurrent state is made of bfloat16 values."""
    states = [state["recurrent"] for run in runs for request in run.requests for state in request.states]
    return all(torch.equal(state.bfloat16().float(), state.float()) for state in states)


def _from_intermediates(bench: LayerBench, parting: str | None) -> tuple[str, str] | None:
    if parting == "router weights":
        return _router(bench)
    if parting == "experts":
        return _dispatch(bench)
    if parting is not None and parting.endswith("projection"):
        return _moved_rows(bench)
    return None


def _router(bench: LayerBench) -> tuple[str, str] | None:
    tokens = sum(int(((mine > 0) != (theirs > 0)).any(dim=1).sum()) for mine, theirs in _pairs(bench, "router weights"))
    if not tokens:
        return None
    return ROUTER_FLIP, f"{tokens} tokens, far from any tie, go to other experts although the router's input is right"


def _dispatch(bench: LayerBench) -> tuple[str, str] | None:
    """Experts as functions are right if some tokens' results are; then the others went to wrong ones."""
    right = wrong = 0
    for mine, theirs in _pairs(bench, "experts"):
        scale = theirs.square().mean().sqrt()
        errors = (mine - theirs).square().mean(dim=1).sqrt() / scale
        right += int((errors <= _parting_bound(bench)).sum())
        wrong += int((errors > 1e-2).sum())
    if not right or not wrong:
        return None
    return MIXING, f"router and weights agree, but {wrong} of {right + wrong} tokens get other experts' results"


def _moved_rows(bench: LayerBench) -> tuple[str, str] | None:
    """Whether every channel of the projections is one of the reference's, some in another place."""
    names = [name for name in ORDER if name.endswith("projection") and _parting(bench, name) is not None]
    true = {name: torch.cat([theirs for _, theirs in _pairs(bench, name)]) for name in names}
    pool = torch.cat(list(true.values()), dim=1).T  # [channels, tokens]
    scale = pool.square().mean().sqrt()
    moved = []
    for name in names:
        mine = torch.cat([mine for mine, _ in _pairs(bench, name)]).T
        nearest = torch.cdist(mine, pool).amin(dim=1) / pool.shape[1] ** 0.5
        if not bool((nearest <= _parting_bound(bench) * scale).all()):
            return None
        if not _parting(bench, name) <= _parting_bound(bench):  # type: ignore[operator]
            moved.append(name)
    if not moved:
        return None
    return WEIGHTS, f"the rows of {', '.join(moved)} stand in other places than the reference's"
