"""Verdicts on one prompt, on small tensors where the right answer is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nxdi_qwen.compile.rounding import dtype_step
from nxdi_qwen.parity.compare import compare_runs
from nxdi_qwen.parity.moe import agreement, margin_rounding
from nxdi_qwen.parity.records import Prompt, Run, TopLogprobs
from nxdi_qwen.parity.result import PromptResult
from nxdi_qwen.parity.rounding import overlap
from tests.parity.small import TOKENS, VOCAB, config, logits, noisy, run


def verdict(target: Run, dtype: str = "float32", sixteen_bit: Run | None = None, **options: object) -> PromptResult:
    return compare_runs(run(), target, sixteen_bit, config(), dtype, **options)  # type: ignore[arg-type]


def test_equal_runs_pass() -> None:
    result = verdict(run())
    assert result.passed and result.two_way_passed and result.three_way_passed is None
    assert [(band.phase, band.top_k) for band in result.bands] == [
        (phase, k) for phase in ("prefill", "decode") for k in (5, 50, 1000, None)
    ]
    assert {band.max_rel for band in result.bands} == {0.0}
    assert not result.token_flips and all(result.top1) and result.positions_rel == [0.0] * (TOKENS + 4)


def test_the_band_of_an_error_is_the_one_of_its_rank() -> None:
    """An error of 1 % at the 20th best token shows in the bands from 50 on, relative to the phase's largest logit."""
    changed = logits()
    largest = changed[:TOKENS].abs().max().item()
    changed[3, changed[3].argsort(descending=True)[19]] += 0.01 * largest
    bands = {(band.phase, band.top_k): band for band in verdict(run(changed)).bands}
    assert bands["prefill", 5].passed and bands["prefill", 5].max_rel == 0.0
    for top_k in (50, 1000, None):
        band = bands["prefill", top_k]
        assert not band.passed and band.worst == 3 and band.max_rel == pytest.approx(0.01, rel=1e-3)
    assert all(band.passed for (phase, _), band in bands.items() if phase == "decode")


def test_own_tolerances() -> None:
    changed = logits()
    changed[1, 7] += 0.003 * changed[:TOKENS].abs().max()
    assert not verdict(run(changed)).passed
    assert verdict(run(changed), tolerances={None: 0.01}).passed


def test_flips_at_near_ties_are_told_apart() -> None:
    expected, changed = logits(), logits()
    best = expected.topk(2, dim=1).indices
    step = dtype_step(expected[2, best[2, 0]].item(), torch.bfloat16)
    for position, margin in ((2, 0.5 * step), (9, 3.0 * step)):
        first, second = best[position]
        expected[position, second] = expected[position, first] - margin
        changed[position] = expected[position]
        changed[position, second] = expected[position, first] + 0.01
    result = compare_runs(run(expected), run(changed), None, config(), "bfloat16")
    assert [(flip.position, flip.phase, flip.near_tie) for flip in result.token_flips] == [
        (2, "prefill", True),
        (9, "decode", False),
    ]
    assert "best token: 2 differ, 1 at near ties, 1 for another reason" in result.reasons
    assert [n for n, same in enumerate(result.top1) if not same] == [2, 9]


@pytest.mark.parametrize(
    ("value", "dtype", "step"), [(1.0, "bfloat16", 2**-7), (3.9, "bfloat16", 2**-6), (-8.0, "float32", 2**-20)]
)
def test_dtype_step(value: float, dtype: str, step: float) -> None:
    assert dtype_step(value, getattr(torch, dtype)) == step
    if value > 0:
        assert (
            torch.nextafter(
                torch.tensor(value, dtype=getattr(torch, dtype)), torch.tensor(torch.inf, dtype=getattr(torch, dtype))
            )
            > value
        )


def test_rounding_like_the_references_passes_three_way_and_fails_a_tight_two_way() -> None:
    result = verdict(run(noisy(0.02, 1)), "bfloat16", run(noisy(0.02, 2)), tolerances={None: 1e-4})
    assert result.passed and result.three_way_passed and not result.two_way_passed
    assert any(line.startswith("two-way, prefill") and "tolerance 1e-04" in line for line in result.reasons)
    assert any(line.startswith("three-way, prefill: no more than the rounding of bfloat16") for line in result.reasons)
    for judged in result.three_way:
        assert judged.std_ratio == pytest.approx(1.0, abs=0.1) and judged.overlap > 0.9


@pytest.mark.parametrize("size", [0.037, 0.06])
def test_twice_the_rounding_fails_three_way(size: float) -> None:
    result = verdict(run(noisy(size, 1)), "bfloat16", run(noisy(0.02, 2)))
    assert not result.passed and not result.three_way_passed
    assert any(line.startswith("three-way, prefill: more than the rounding of bfloat16") for line in result.reasons)


def test_less_than_the_rounding_is_no_fault() -> None:
    result = verdict(run(noisy(0.001, 1)), "bfloat16", run(noisy(0.02, 2)))
    assert result.passed and result.three_way[0].std_ratio == pytest.approx(0.05, rel=0.2)


def test_one_wrong_position_does_not_hide() -> None:
    """Its error is far above rounding, and too rare to move the standard deviation much."""
    changed = noisy(0.02, 1)
    changed[4] += 0.07 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(5))
    result = verdict(run(changed), "bfloat16", run(noisy(0.02, 2)))
    judged = result.three_way[0]
    assert not result.passed and judged.worst == 4 and judged.worst_ratio > judged.worst_ratio_bound
    assert judged.std_ratio <= judged.std_ratio_bound and judged.overlap >= judged.overlap_bound


def test_errors_of_another_shape_are_not_rounding() -> None:
    """As large as the reference's, but all of one size."""
    changed = logits() + 0.02 * torch.sign(noisy(1.0, 1) - logits())
    result = verdict(run(changed), "bfloat16", run(noisy(0.02, 2)))
    judged = result.three_way[0]
    assert not result.passed and judged.overlap < judged.overlap_bound
    assert judged.std_ratio == pytest.approx(1.0, abs=0.05)


def test_overlap_of_normal_distributions() -> None:
    """Two normal densities whose means are d apart overlap by 2 Phi(-d / 2) (Inman and Bradley 1989)."""
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 100_000, generator=generator)
    for distance in (0.0, 1.0, 3.0):
        expected = math.erfc(distance / 2 / math.sqrt(2))
        assert overlap(first + distance, second) == pytest.approx(expected, abs=0.02)


def experts(changes: dict[tuple[int, int], list[int]]) -> Tensor:
    chosen = torch.tensor([0, 1, 2]).repeat(2, TOKENS + 4, 1)
    for (layer, position), own in changes.items():
        chosen[layer, position] = torch.tensor(own)
    return chosen


def test_only_tokens_with_the_same_experts_are_judged() -> None:
    margins = torch.full((2, TOKENS + 4), 0.1)
    margins[1, 5] = 1e-4
    changed = noisy(0.02, 1)
    changed[5] += 2.0
    reference = run(experts=experts({}), router_margins=margins)
    target = run(changed, experts=experts({(1, 5): [0, 1, 3]}), router_margins=margins)
    sixteen_bit = run(noisy(0.02, 2), experts=experts({(0, 2): [0, 2, 5]}), router_margins=margins)
    result = compare_runs(reference, target, sixteen_bit, config(moe=True), "bfloat16")
    assert result.passed and not result.judged[5] and sum(result.judged) == TOKENS + 3
    assert max(band.max_rel for band in result.bands) < 0.1
    (flip,) = result.routing_flips
    assert (flip.layer, flip.position, flip.near_tie) == (3, 5, True)
    assert "experts: 1 differ, 1 at near ties, 0 for another reason" in result.reasons


def test_agreement_counts_layers_so_far() -> None:
    reference, target = run(experts=experts({})), run(experts=experts({(1, 5): [0, 1, 3]}))
    for layer, agrees in ((0, True), (1, True), (2, True), (3, False), (None, False)):
        assert bool(agreement(reference, target, config(moe=True), layer)[5]) == agrees


def test_a_flip_with_a_clear_margin_is_no_near_tie_and_only_the_first_counts() -> None:
    margins = torch.full((2, TOKENS + 4), 0.5)
    reference = run(experts=experts({}), router_margins=margins)
    target = run(experts=experts({(0, 5): [0, 1, 3], (1, 5): [0, 1, 4]}), router_margins=margins)
    result = compare_runs(reference, target, None, config(moe=True), "bfloat16")
    assert [(flip.layer, flip.position, flip.near_tie) for flip in result.routing_flips] == [(1, 5, False)]


def test_margin_rounding_is_measured_on_the_sixteen_bit_reference() -> None:
    margins = torch.full((2, TOKENS + 4), 0.1)
    reference = run(experts=experts({}), router_margins=margins)
    moved = margins.clone()
    moved[1, 3] = 0.3
    sixteen_bit = run(experts=experts({}), router_margins=moved)
    assert margin_rounding(reference, sixteen_bit, 1, "bfloat16") == pytest.approx(2 * 0.2, rel=1e-4)
    assert margin_rounding(reference, None, 1, "float32") < 1e-4
    flipped = run(experts=experts({(1, 4): [0, 1, 3]}), router_margins=torch.full((2, TOKENS + 4), 0.2))
    assert margin_rounding(reference, flipped, 1, "bfloat16") == pytest.approx(2 * (0.1 + 0.2), rel=1e-4)


def top(values: Tensor, count: int) -> TopLogprobs:
    best = values.log_softmax(dim=-1).topk(count, dim=-1)
    return TopLogprobs(best.indices, best.values)


def test_a_server_is_compared_on_what_it_returns() -> None:
    served = top(logits(), 20)
    served.ids[0], served.logprobs[0] = -1, math.nan
    result = compare_runs(run(), Run(run().prompt, run().forced, top=served), None, config(), "unknown")
    assert result.passed and result.compared == "logprobs of the best 20"
    assert {band.top_k for band in result.bands} == {5}
    assert "the best 50: the target returns 20 log probabilities a position" in result.not_compared
    assert "position 0: not returned" in result.not_compared
    assert result.positions_rel[0] is None and max(result.positions_rel[1:]) < 1e-5  # type: ignore[type-var]


def test_a_server_that_leaves_out_a_good_token_fails() -> None:
    """The reference's best token is not among the 20: its log probability there is at most that of the last one."""
    changed = logits()
    changed[6, changed[6].argmax()] = -9.0
    result = compare_runs(run(), Run(run().prompt, run().forced, top=top(changed, 20)), None, config(), "unknown")
    assert not result.passed and result.bands[0].worst == 6


def test_not_finite_is_the_first_in_the_order_of_computation() -> None:
    hidden = torch.zeros(5, TOKENS + 4, 6)
    hidden[3, 7:] = math.nan
    hidden[4, 7:] = math.nan
    states = {"layers.3.recurrent": torch.zeros(5, 2, 3, 3)}
    states["layers.3.recurrent"][1:] = math.inf
    broken = logits()
    broken[7:] = math.nan
    result = compare_runs(run(), run(broken, hidden=hidden, states=states), None, config(), "float32")
    (found,) = result.non_finite
    assert (found.tensor, found.layer, found.step, found.position) == ("hidden states", 2, 0, 7)
    assert found.line().startswith("NaN in the target's hidden states, layer 2, prefill, position 7 (")
    assert not result.passed


def test_a_state_comes_before_what_leaves_its_layer() -> None:
    hidden = torch.zeros(5, TOKENS + 4, 6)
    hidden[3, 2:] = math.nan
    states = {"layers.2.recurrent": torch.full((5, 2, 3, 3), math.nan)}
    assert verdict(run(hidden=hidden, states=states)).non_finite[0].tensor == "recurrent state"


def test_the_step_of_a_position() -> None:
    hidden = torch.zeros(5, TOKENS + 4, 6)
    hidden[0, TOKENS + 1] = math.inf
    line = verdict(run(hidden=hidden)).non_finite[0].line()
    assert line == f"inf in the target's embedding, decode step 2, position {TOKENS + 1} (6 such values)"


def test_an_infinite_state_after_a_decode_step() -> None:
    states = {"layers.3.recurrent": torch.zeros(5, 2, 3, 3)}
    states["layers.3.recurrent"][2:, 0, 0, 0] = math.inf
    result = verdict(run(states=states))
    assert result.non_finite[0].line() == (
        "inf in the target's recurrent state, layer 3, decode step 2 (3 such values)"
    )
    assert not result.passed


def test_nan_logits_fail_every_verdict() -> None:
    broken = noisy(0.02, 1)
    broken[2, 3] = math.nan
    result = verdict(run(broken), "bfloat16", run(noisy(0.02, 2)))
    assert not result.passed and not result.two_way_passed and not result.three_way_passed
    assert result.positions_rel[2] == math.inf


def test_a_prompt_without_decode_steps() -> None:
    alone = Run(Prompt("short", (1,)), (), logits=logits()[:1])
    result = compare_runs(alone, alone, None, config(), "float32")
    assert result.passed and {band.phase for band in result.bands} == {"prefill"}
