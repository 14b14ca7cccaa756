"""Both forms of the routed experts, and the router, against Hugging Face's modules."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeExperts, Qwen3_5MoeTopKRouter
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextExperts, Qwen3NextTopKRouter

from nxdi_qwen.modeling.ops import experts as ops
from nxdi_qwen.modeling.ops.experts import block_size, experts_by_block, experts_by_token, route
from tests.comparison import relative

HIDDEN, INNER = 20, 12
FORMS = [experts_by_token, experts_by_block]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hf_config(experts: int, top_k: int, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        num_experts=experts,
        num_experts_per_tok=top_k,
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        hidden_act="silu",
        _experts_implementation="eager",
        **more,
    )


@functools.cache
def weights_of(experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """gate, up [E, I, H] and down [E, H, I]."""
    gate, up = normal(2, experts, INNER, HIDDEN, seed=experts)
    return gate / 4, up / 4, normal(experts, HIDDEN, INNER, seed=experts + 1) / 4


@torch.no_grad()
def hf_experts(
    x: Tensor, chosen: Tensor, weights: Tensor, matrices: tuple[Tensor, ...], module: Any = Qwen3NextExperts
) -> Tensor:
    gate, up, down = (matrix.to(x.dtype) for matrix in matrices)
    reference = module(hf_config(len(gate), chosen.shape[1]))
    reference.gate_up_proj.data, reference.down_proj.data = torch.cat([gate, up], dim=1), down
    return reference(x, chosen, weights)


def random_routing(tokens: int, experts: int, top_k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return route(normal(tokens, experts, seed=seed), top_k, renormalize=True)


def check(x: Tensor, chosen: Tensor, weights: Tensor, experts: int) -> None:
    expected = hf_experts(x, chosen, weights, weights_of(experts))
    for form in FORMS:
        out = form(x, *weights_of(experts), chosen, weights)
        assert out.shape == x.shape
        assert relative(out, expected) < 1e-6, form.__name__


@pytest.mark.parametrize(("experts", "top_k"), [(8, 3), (8, 1), (5, 5), (1, 1), (40, 2), (16, 10)], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 16, 33, 64, 129, 300])
def test_random_routing(tokens: int, experts: int, top_k: int) -> None:
    """From fewer assignments than experts to many tokens an expert; top-k = all experts too."""
    check(normal(tokens, HIDDEN, seed=tokens), *random_routing(tokens, experts, top_k), experts)


def test_the_other_family() -> None:
    x, (chosen, weights) = normal(50, HIDDEN, seed=1), random_routing(50, 8, 3)
    expected = hf_experts(x, chosen, weights, weights_of(8), Qwen3_5MoeExperts)
    for form in FORMS:
        assert relative(form(x, *weights_of(8), chosen, weights), expected) < 1e-6


@pytest.mark.parametrize("tokens", [1, 5, 64, 300])
@pytest.mark.parametrize("favourite", [0, 3, 7])
def test_skewed_routing(favourite: int, tokens: int) -> None:
    """Every token to one expert; every token to the same two; one token of 300 elsewhere."""
    x = normal(tokens, HIDDEN, seed=tokens)
    one = torch.full((tokens, 1), favourite)
    check(x, one, normal(tokens, 1, seed=1).sigmoid(), 8)
    two = torch.cat([one, (one + 5) % 8], dim=1)
    check(x, two, normal(tokens, 2, seed=2).sigmoid(), 8)
    one[-1] = (favourite + 1) % 8
    check(x, one, normal(tokens, 1, seed=3).sigmoid(), 8)


@pytest.mark.parametrize("tokens", [3, 64, 129])
def test_every_expert_filled_to_its_last_place(tokens: int) -> None:
    """Loads that just fill a block, and loads one above: the worst case that the number of blocks is computed for."""
    experts = 6
    size = block_size(tokens, experts)
    for load in (size, size + 1):
        chosen = torch.arange(tokens).div(load, rounding_mode="trunc").clamp(max=experts - 1)[:, None]
        check(normal(tokens, HIDDEN, seed=load), chosen, normal(tokens, 1, seed=4).sigmoid(), experts)


@pytest.mark.parametrize("tokens", range(1, 40))
def test_no_routing_needs_more_blocks_than_there_are(tokens: int) -> None:
    """Loads of 1 in all experts but one leave as many half-empty blocks as possible."""
    experts = 7
    for spread in range(min(experts, tokens)):
        chosen = torch.full((tokens, 1), experts - 1)
        chosen[:spread, 0] = torch.arange(spread)
        check(normal(tokens, HIDDEN, seed=tokens), chosen, torch.ones(tokens, 1), experts)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("form", FORMS)
def test_a_poisoned_row_stays_alone(form: Any, poison: float) -> None:
    x, (chosen, weights) = normal(60, HIDDEN, seed=1), random_routing(60, 8, 3)
    bad = torch.arange(60) % 4 == 1
    clean = form(x, *weights_of(8), chosen, weights)
    dirty_weights = torch.where(bad[:, None], poison, weights)
    dirty = form(torch.where(bad[:, None], poison, x), *weights_of(8), chosen, dirty_weights)
    assert torch.equal(clean[~bad], dirty[~bad])


@pytest.mark.parametrize("renormalize", [True, False])
def test_a_poisoned_row_is_routed_somewhere(renormalize: bool) -> None:
    """Indices must stay in range whatever the logits are, for they address weights."""
    logits = normal(6, 8, seed=0)
    logits[1], logits[3], logits[4, 2] = float("nan"), float("inf"), float("-inf")
    chosen, weights = route(logits, 3, renormalize)
    assert set(chosen.flatten().tolist()) <= set(range(8))
    good = torch.tensor([0, 2, 4, 5])
    clean_chosen, clean_weights = route(logits[good], 3, renormalize)
    assert torch.equal(chosen[good], clean_chosen)
    assert torch.equal(weights[good], clean_weights)


@pytest.mark.parametrize("per_wave", [1, 3, 7, 1000])
def test_waves(per_wave: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks run in several goes when there are many; the last one may be shorter."""
    x, (chosen, weights) = normal(129, HIDDEN, seed=1), random_routing(129, 8, 3)
    whole = experts_by_block(x, *weights_of(8), chosen, weights)
    monkeypatch.setattr(ops, "_MIN_BLOCKS_PER_WAVE", per_wave)
    monkeypatch.setattr(ops, "_MAX_WAVES", 1000)
    assert relative(experts_by_block(x, *weights_of(8), chosen, weights), whole) < 1e-6
    check(x, chosen, weights, 8)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("module", [Qwen3NextTopKRouter, Qwen3_5MoeTopKRouter])
def test_router(module: Any, renormalize: bool, dtype: torch.dtype) -> None:
    router = module(hf_config(8, 3, norm_topk_prob=renormalize))
    router.weight.data = normal(8, HIDDEN, seed=1).to(dtype)
    logits, scores, indices = router(normal(50, HIDDEN, seed=2).to(dtype))
    # Qwen3.5 has no such key and always renormalises.
    chosen, weights = route(logits, 3, renormalize or module is Qwen3_5MoeTopKRouter)
    assert torch.equal(chosen, indices)
    assert torch.equal(weights, scores)
    assert weights.dtype == dtype


def test_bfloat16_sums_the_experts_in_float32() -> None:
    """Not worse than Hugging Face, which rounds after every expert."""
    x, (chosen, weights) = normal(64, HIDDEN, seed=1).bfloat16(), random_routing(64, 8, 3)
    weights, rounded = weights.bfloat16(), tuple(matrix.bfloat16() for matrix in weights_of(8))
    exact = hf_experts(x.double(), chosen, weights.double(), rounded)
    hf_error = (hf_experts(x, chosen, weights, rounded).double() - exact).abs().mean()
    for form in FORMS:
        out = form(x, *rounded, chosen, weights)
        assert out.dtype == torch.bfloat16
        assert (out.double() - exact).abs().mean() <= 1.1 * hf_error
