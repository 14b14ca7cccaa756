"""The comparison: runs side by side, the verdict on every prompt, and where it fails the way to the fault."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.parity.bands import TOLERANCES, TOP_K, Tolerances, judge_bands
from nxdi_qwen.parity.drill import Progress, Runs, drill
from nxdi_qwen.parity.errors import Errors
from nxdi_qwen.parity.finite import first_non_finite
from nxdi_qwen.parity.growth import hidden_errors, state_errors
from nxdi_qwen.parity.moe import agreement, routing_flips
from nxdi_qwen.parity.near_ties import margins, token_flips, top1
from nxdi_qwen.parity.records import Run, Target, TopLogprobs
from nxdi_qwen.parity.result import (
    DECODE,
    PREFILL,
    Band,
    Comparison,
    Drill,
    PromptResult,
    RoutingFlip,
    ThreeWay,
    TokenFlip,
)
from nxdi_qwen.parity.rounding import judge_rounding

# Fewer tokens whose experts agree make no verdict; then all tokens are judged.
FEWEST_AGREEING = 8
# In 16 bit, a token whose experts are chosen differently moves by tens of percent, and through the state all behind it.
MOE_BFLOAT16_TOLERANCE = 0.5


def compare_runs(
    reference: Run,
    target: Run,
    sixteen_bit: Run | None,
    config: ModelConfig,
    dtype: str,
    tolerances: Tolerances | None = None,
) -> PromptResult:
    """The verdict on one prompt.

    `reference` is float32, `target` and `sixteen_bit` (Hugging Face in bfloat16; not needed for a float32 target) are
    forced along its tokens. `dtype`: the target's, "unknown" is taken for bfloat16. `tolerances`: of the two-way
    verdict, by k; None: those of the dtype. With a 16-bit reference the three-way verdict decides, unless the target is
    float32; without one the two-way verdict does. Anything that is not finite fails.
    """
    dtype = "float32" if dtype == "float32" else "bfloat16"
    errors = Errors.of(reference, target)
    other = None
    if sixteen_bit is not None and dtype != "float32":
        other = Errors.of(reference, _like(target, sixteen_bit))
    non_finite = [
        found
        for side, run in (("reference", reference), ("target", target), ("16-bit reference", sixteen_bit))
        if run is not None and (found := first_non_finite(run, side))
    ]
    agree = agreement(reference, target, config)
    agree_16 = torch.ones_like(agree) if sixteen_bit is None else agreement(reference, sixteen_bit, config)
    reasons = []
    judged, judged_16 = agree, agree_16
    if min(int(agree.sum()), int(agree_16.sum())) < min(FEWEST_AGREEING, len(agree)):
        judged = judged_16 = torch.ones_like(agree)
        reasons.append(f"only {int(agree.sum())} tokens have the reference's experts in all layers: all are judged")
    elif not agree.all():
        reasons.append(f"judged over the {int(agree.sum())} of {len(agree)} tokens with the reference's experts")
    if tolerances is None:
        wide = dtype != "float32" and any(config.moe_layers)
        tolerances = dict.fromkeys(TOP_K, MOE_BFLOAT16_TOLERANCE) if wide else TOLERANCES[dtype]

    phases = (PREFILL, DECODE) if reference.forced else (PREFILL,)
    bands = [band for phase in phases for band in judge_bands(errors, phase, judged, tolerances)]
    three_way = [
        verdict
        for phase in phases
        if other is not None and (verdict := judge_rounding(errors, other, phase, judged, judged_16)) is not None
    ]
    two_way_passed = bool(bands) and all(band.passed for band in bands)
    three_way_passed = all(verdict.passed for verdict in three_way) if three_way else None
    finite = not any(found.side != "16-bit reference" for found in non_finite)
    passed = finite and (two_way_passed if three_way_passed is None else three_way_passed)
    token = token_flips(reference, target, dtype)
    routing = routing_flips(reference, target, sixteen_bit if other is not None else None, config, dtype)
    reasons += _reasons(bands, three_way, token, routing, dtype)
    rel = _relative(errors)
    best, mine = errors.reference.argmax(dim=-1), top1(target)
    hidden = hidden_errors(reference, target)
    hidden_16 = None if sixteen_bit is None else hidden_errors(reference, sixteen_bit)
    return PromptResult(
        prompt=reference.prompt.name,
        tokens=len(reference.prompt.ids),
        steps=len(reference.forced),
        compared="logits" if errors.top_k is None else f"logprobs of the best {errors.top_k}",
        not_compared=tuple(_not_compared(errors, tolerances, reference, target)),
        non_finite=tuple(non_finite),
        bands=tuple(bands),
        three_way=tuple(three_way),
        token_flips=tuple(token),
        sixteen_bit_flips=None
        if other is None or sixteen_bit is None
        else len(token_flips(reference, sixteen_bit, dtype)),
        routing_flips=tuple(routing),
        positions_rel=rel,
        sixteen_bit_rel=None if other is None else _relative(other),
        margins=margins(errors.reference).tolist(),
        top1=[bool(a == b) if a >= 0 else None for a, b in zip(mine.tolist(), best.tolist(), strict=True)],
        judged=judged.tolist(),
        hidden_rel=None if hidden is None else hidden.tolist(),
        hidden_rel_sixteen_bit=None if hidden_16 is None else hidden_16.tolist(),
        states_rel=_lists(state_errors(reference, target)),
        states_rel_sixteen_bit=None if sixteen_bit is None else _lists(state_errors(reference, sixteen_bit)),
        two_way_passed=two_way_passed,
        three_way_passed=three_way_passed,
        passed=passed,
        reasons=tuple(reasons),
    )


def explain(
    reference: Target, target: Target, sixteen_bit: Target | None, runs: Sequence[Runs], progress: Progress
) -> Drill:
    """The place and the cause of a difference: see `drill`. `runs`: all sides' runs of some prompts, best a long and a
    short one, of which the reference's have hidden states.
    """
    return drill(reference, target, sixteen_bit, runs, progress)


def comparison(
    reference: Target,
    target: Target,
    sixteen_bit: Target | None,
    prompts: Sequence[PromptResult],
    found: Drill | None,
) -> Comparison:
    """The whole outcome, with the lines that stand first in a report."""
    bad = [line for result in prompts for line in (f"{result.prompt}: {f.line()}" for f in result.non_finite)]
    failed = [result for result in prompts if not result.passed]
    passed = not failed
    lines = list(bad)
    lines.append("passed" if passed else f"FAILED: {len(failed)} of {len(prompts)} prompts")
    for result in failed or prompts[:1]:
        lines += [f"{result.prompt}: {reason}" for reason in result.reasons]
    if found is not None:
        lines += _drill_lines(found)
    side = None if sixteen_bit is None else sixteen_bit.description
    return Comparison(reference.description, target.description, side, tuple(prompts), found, passed, tuple(lines))


def _drill_lines(found: Drill) -> list[str]:
    lines = []
    if found.place is not None:
        place = found.place
        position = "" if place.position is None else f", position {place.position}"
        lines.append(
            f"parts in {place.name}{position} ({place.situation}): {place.tensor} {place.error:.1e} off, "
            f"rounding allows {place.rounding:.1e}"
        )
    if found.cause is not None:
        parting = "" if found.cause.first_parting is None else f"; first to differ: {found.cause.first_parting}"
        lines.append(f"cause: {found.cause.name} ({found.cause.evidence}{parting})")
    return lines + list(found.notes)


def _like(target: Run, sixteen_bit: Run) -> Run:
    """The 16-bit run as far as the target gives it: of a server the same tokens' log probabilities."""
    if target.top is None or sixteen_bit.logits is None:
        return sixteen_bit
    logprobs = sixteen_bit.logits.log_softmax(dim=-1).gather(1, target.top.ids.clamp(min=0))
    absent = target.top.ids < 0
    top = TopLogprobs(target.top.ids, torch.where(absent, math.nan, logprobs))
    return Run(sixteen_bit.prompt, sixteen_bit.forced, top=top)


def _relative(errors: Errors) -> list[float | None]:
    scales = torch.where(errors.phase(PREFILL), errors.scale(PREFILL), 1.0)
    if errors.phase(DECODE).any():
        scales = torch.where(errors.phase(DECODE), errors.scale(DECODE), scales)
    rel = torch.nan_to_num(errors.per_position() / scales, nan=math.inf)
    return [value if known else None for value, known in zip(rel.tolist(), errors.compared.tolist(), strict=True)]


def _not_compared(errors: Errors, tolerances: Tolerances, reference: Run, target: Run) -> list[str]:
    lines = []
    if errors.top_k is not None:
        for top_k in tolerances:
            if top_k is None or top_k > errors.top_k:
                what = "all logits" if top_k is None else f"the best {top_k}"
                lines.append(f"{what}: the target returns {errors.top_k} log probabilities a position")
        absent = (~errors.compared).nonzero()[:, 0].tolist()
        if absent:
            lines.append(f"position{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}: not returned")
    for what in ("hidden", "states"):
        if getattr(reference, what) is not None and getattr(target, what) is None:
            lines.append(f"{'hidden states' if what == 'hidden' else 'states'}: the target does not give them")
    if reference.experts is not None and target.experts is None:
        lines.append("experts: the target does not tell them, so that tokens with other experts are judged as well")
    return lines


def _reasons(
    bands: Sequence[Band],
    three_way: Sequence[ThreeWay],
    token: Sequence[TokenFlip],
    routing: Sequence[RoutingFlip],
    dtype: str,
) -> list[str]:
    lines = []
    for phase in (PREFILL, DECODE):
        failed = [band for band in bands if band.phase == phase and not band.passed]
        if failed:
            band = max(failed, key=lambda band: band.max_rel / max(band.tolerance, 1e-30))
            which = "all logits" if band.top_k is None else f"the best {band.top_k}"
            lines.append(
                f"two-way, {phase}: {band.max_rel:.1e} of the largest logit over {which} at position {band.worst}, "
                f"tolerance {band.tolerance:.0e}"
            )
    for verdict in three_way:
        figures = (
            f"standard deviation {verdict.std_ratio:.2f} times that of the reference in {dtype} "
            f"(at most {verdict.std_ratio_bound}), distributions overlap by {verdict.overlap:.0%} "
            f"(at least {verdict.overlap_bound:.0%}), worst position {verdict.worst_ratio:.2f} times "
            f"(at most {verdict.worst_ratio_bound})"
        )
        meaning = f"no more than the rounding of {dtype}" if verdict.passed else f"more than the rounding of {dtype}"
        lines.append(f"three-way, {verdict.phase}: {meaning}: {figures}")
    for flips, what in ((token, "best token"), (routing, "experts")):
        if flips:
            near = sum(flip.near_tie for flip in flips)
            lines.append(f"{what}: {len(flips)} differ, {near} at near ties, {len(flips) - near} for another reason")
    return lines


def _lists(errors: dict[str, Tensor]) -> dict[str, list[float]] | None:
    return {name: values.tolist() for name, values in errors.items()} or None
