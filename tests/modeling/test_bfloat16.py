"""bfloat16 against float32: the mean error of the logits is at most 1.1 times that of Hugging Face's own bfloat16 run.

All runs have the same weights, rounded to bfloat16 beforehand, and the same tokens (teacher-forced): a prefill of 100,
then 64 decode steps, on 8 models. A mixture of experts is compared twice: with all experts chosen, and with its own
top-k over those tokens whose expert sets equal float32's in both runs and every layer, since one flipped expert costs
more than all rounding. (Flips of earlier tokens still reach a token through the state, in both runs alike.)
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from nxdi_qwen.modeling.layers.mlp import Router
from tests.hf_fixtures import hf_model, reference_logits
from tests.support import EagerForward, Engine, load, tokens_of

pytestmark = pytest.mark.slow
SEEDS, PROMPT, STEPS = 8, 100, 64
FACTOR = 1.1
CASES = ("qwen3_5", "qwen3_next", "qwen3_5_moe", "qwen3_next_all_experts", "qwen3_5_moe_all_experts")


class Run(NamedTuple):
    """Logits [164, V] float32, and the experts of every MoE layer, sorted: [164, layers, k]."""

    logits: Tensor
    experts: Tensor


class Model(NamedTuple):
    """One seed: Hugging Face with rounded weights (float32), what it and its bfloat16 run give, and the tokens."""

    rounded: PreTrainedModel
    ids: Tensor
    exact: Run
    theirs: Run


def rounded_model(case: str, seed: int) -> PreTrainedModel:
    model = copy.deepcopy(hf_model(case.removesuffix("_all_experts"), seed))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).to(torch.float32)
    if case.endswith("_all_experts"):
        model.config.num_experts_per_tok = model.config.num_experts
        for layer in model.model.layers:
            layer.mlp.gate.top_k = model.config.num_experts
    return model


def in_bfloat16(model: PreTrainedModel) -> PreTrainedModel:
    """As Hugging Face loads it: parameters in 16 bit, the rotary frequencies in float32."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def record(routers: list[nn.Module], output: int, run: Callable[[], list[Tensor]]) -> Run:
    """Logits of `run`, and what its `routers` chose meanwhile (entry `output` of what they return)."""
    chosen: list[list[Tensor]] = [[] for _ in routers]
    handles = [
        router.register_forward_hook(lambda _m, _i, out, own=own: own.append(out[output].sort(dim=-1).values))
        for router, own in zip(routers, chosen, strict=True)
    ]
    logits = torch.cat(run()).float()
    for handle in handles:
        handle.remove()
    experts = torch.stack([torch.cat(own) for own in chosen], dim=1) if routers else torch.empty(len(logits), 0, 0)
    return Run(logits, experts)


def hf_routers(model: PreTrainedModel) -> list[nn.Module]:
    return [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]


@torch.no_grad()
def hf_bfloat16_run(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    cache = DynamicCache(config=model.config)
    pieces = [ids[:PROMPT], *ids[PROMPT:].split(1)]
    return [model(input_ids=piece[None], cache=cache, use_cache=True).logits[0] for piece in pieces]


@functools.cache
def models(case: str) -> list[Model]:
    result = []
    for seed in range(SEEDS):
        model = rounded_model(case, seed)
        ids = tokens_of(case.removesuffix("_all_experts"), seed)[: PROMPT + STEPS]
        exact = record(hf_routers(model), 2, lambda m=model, i=ids: [reference_logits(m, i)])
        half = in_bfloat16(model)
        theirs = record(hf_routers(half), 2, lambda m=half, i=ids: hf_bfloat16_run(m, i))
        result.append(Model(model, ids, exact, theirs))
    return result


def our_run(model: Model, changes: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Run:
    forward = EagerForward(load(model.rounded, torch.bfloat16), torch.bfloat16)
    forward = forward.with_weights(changes(forward.weights))
    routers: list[nn.Module] = [module for module in forward.model.modules() if isinstance(module, Router)]

    def run() -> list[Tensor]:
        engine = Engine(forward)
        logits = [engine.prefill({0: model.ids[:PROMPT]})[0].every]
        for token in model.ids[PROMPT:]:
            logits.append(engine.decode({0: int(token)}, row_is_slot=False)[0][None])
        return logits

    return record(routers, 0, run)


def ratios(case: str, changes: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda _: {}) -> tuple[float, float]:
    """Our mean |error| over Hugging Face's, pooled over seeds: of the prefill and of the decode steps."""
    total = torch.zeros(2, 2, dtype=torch.float64)  # ours, theirs; prefill, decode
    kept = torch.zeros(2, dtype=torch.int64)
    flips = torch.zeros(2, dtype=torch.int64)
    for model in models(case):
        ours = our_run(model, changes)
        same = torch.ones(2, PROMPT + STEPS, dtype=torch.bool)
        for row, run in enumerate((ours, model.theirs)):
            flipped = (run.experts != model.exact.experts).any(dim=-1)  # [tokens, layers]
            same[row] = ~flipped.any(dim=-1)
            flips[row] += flipped.sum()
        use = same.all(dim=0)
        for column, part in enumerate((slice(None, PROMPT), slice(PROMPT, None))):
            kept[column] += use[part].sum()
            for row, run in enumerate((ours, model.theirs)):
                total[row, column] += (run.logits - model.exact.logits)[part][use[part]].abs().double().sum()
    assert (kept > 20).all(), f"too few tokens without a flip: {kept.tolist()}"
    prefill, decode = (total[0] / total[1]).tolist()
    mean = total / kept / model.exact.logits.shape[1]
    print(
        f"{case}: mean |error| ours {mean[0, 0]:.5f} prefill, {mean[0, 1]:.5f} decode; "
        f"theirs {mean[1, 0]:.5f}, {mean[1, 1]:.5f}; ratios {prefill:.3f}, {decode:.3f}; "
        f"{kept.tolist()} tokens compared; expert sets flipped: ours {flips[0]}, theirs {flips[1]}"
    )
    return prefill, decode


@pytest.mark.parametrize("case", CASES)
def test_error_is_no_larger_than_hugging_faces(case: str) -> None:
    prefill, decode = ratios(case)
    assert prefill <= FACTOR
    assert decode <= FACTOR


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_5_moe"])
def test_control_one_weight_times_1_05_fails(case: str) -> None:
    """The criterion notices a single wrong weight."""
    name = "layers.1.linear_attn.out_proj.weight"
    prefill, decode = ratios(case, lambda weights: {name: weights[name] * 1.05})
    assert prefill > FACTOR
    assert decode > FACTOR
