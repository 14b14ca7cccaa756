"""Expert choices: which tokens can be compared at all, and which choices differ for a reason."""

from __future__ import annotations

import torch
from torch import Tensor

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.parity.records import Run
from nxdi_qwen.parity.result import RoutingFlip

# How far rounding moves a router's margin, a probability of at most 1 / top-k: this share of that, for hidden states
# that differ as far as rounding lets them (see `growth`); in bfloat16 at least `MARGIN_MOVES` times the largest move of
# the 16-bit reference. Largest flip seen in bfloat16 by `tests.parity.measure_rounding`: 0.35 / top-k.
MARGIN_SHARE = {"float32": 1e-4, "bfloat16": 0.4}
MARGIN_MOVES = 2.0


def agreement(reference: Run, target: Run, config: ModelConfig, layer: int | None = None) -> Tensor:
    """[N] bool: tokens whose experts are the same in every sparse layer up to `layer` (None: the last).

    All true where a side does not tell its experts.
    """
    positions = len(reference.prompt.ids) + len(reference.forced)
    if reference.experts is None or target.experts is None:
        return torch.ones(positions, dtype=torch.bool)
    sparse = _sparse_layers(config)
    count = len(sparse) if layer is None else sum(index <= layer for index in sparse)
    return (reference.experts[:count] == target.experts[:count]).all(dim=-1).all(dim=0)


def routing_flips(
    reference: Run, target: Run, sixteen_bit: Run | None, config: ModelConfig, dtype: str
) -> list[RoutingFlip]:
    """For every token the first sparse layer in which its experts differ; what follows there is a consequence."""
    if reference.experts is None or target.experts is None:
        return []
    flips = []
    same_so_far = torch.ones(reference.experts.shape[1], dtype=torch.bool)
    for number, layer in enumerate(_sparse_layers(config)):
        same = (reference.experts[number] == target.experts[number]).all(dim=-1)
        bound = margin_rounding(reference, sixteen_bit, number, dtype)
        for position in (same_so_far & ~same).nonzero()[:, 0].tolist():
            margin = None if reference.router_margins is None else reference.router_margins[number, position].item()
            flips.append(RoutingFlip(layer, position, margin, bound, margin is not None and margin <= bound))
        same_so_far &= same
    return flips


def margin_rounding(reference: Run, sixteen_bit: Run | None, number: int, dtype: str) -> float:
    """By how much rounding in `dtype` moves the margin of the router of sparse layer `number`."""
    assert reference.experts is not None
    least = MARGIN_SHARE["float32" if dtype == "float32" else "bfloat16"] / reference.experts.shape[-1]
    if dtype == "float32" or sixteen_bit is None or sixteen_bit.router_margins is None:
        return least
    if reference.router_margins is None or sixteen_bit.experts is None:
        return least
    before = (reference.experts[:number] == sixteen_bit.experts[:number]).all(dim=-1).all(dim=0)
    same = (reference.experts[number] == sixteen_bit.experts[number]).all(dim=-1)
    theirs, mine = sixteen_bit.router_margins[number], reference.router_margins[number]
    # Of a pair that changed places the margin went through zero.
    moves = torch.where(same, (theirs - mine).abs(), theirs + mine)[before]
    return max(least, MARGIN_MOVES * moves.max().item()) if len(moves) else least


def _sparse_layers(config: ModelConfig) -> list[int]:
    return [index for index, sparse in enumerate(config.moe_layers) if sparse]
