"""Routed experts with static shapes: one form for prefill, one for decode.

Shared shapes: `x` [N, H]; `gate`, `up` [E, I, H] and `down` [E, H, I], the experts' weights; `chosen` [N, k] int64,
`weights` [N, k] in the model's dtype. An entry of `chosen` outside 0 .. E - 1 is an expert of another rank, and adds
nothing. Both return [N, H] in the dtype of `x`, summed over the k experts in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# Prefill gathers the weights of this share of its blocks at a time, which bounds both memory and graph size.
_MAX_WAVES = 8
_MIN_BLOCKS_PER_WAVE = 16


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights, [N, k] each, from router logits [N, E].

    Softmax, top-k and renormalisation in float32; the weights are cast back to the dtype of `logits`.
    """
    weights, chosen = torch.topk(torch.softmax(logits.to(torch.float32), dim=-1), top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return chosen, weights.to(logits.dtype)


def experts_by_token(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Decode: reads the chosen experts only, N * k of them."""
    tokens, top_k = chosen.shape
    expert = chosen.reshape(-1).clamp(0, gate.shape[0] - 1)
    repeated = x[:, None, :].expand(-1, top_k, -1).reshape(tokens * top_k, 1, x.shape[1])
    return _combine(_swiglu(repeated, gate[expert], up[expert], down[expert])[:, 0], chosen, expert, weights, x.dtype)


def experts_by_block(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Prefill: tokens sorted by expert into blocks of one expert each, the last block of an expert padded.

    The number of blocks is the worst case of any routing, so the shapes are static; the work is that of N * k tokens
    plus less than a block per expert. Everything is a gather: where each token went is computed, not scattered.
    """
    tokens, top_k = chosen.shape
    experts = gate.shape[0]
    total = tokens * top_k
    size = block_size(total, experts)
    busy = min(experts, total)
    blocks = busy + (total - busy) // size

    # [N * k], one entry an assignment; other ranks' experts sort behind this rank's.
    assigned = chosen.reshape(-1)
    expert = torch.where(assigned < 0, experts, assigned).clamp(max=experts)
    number = torch.arange(total, device=x.device)
    order = torch.argsort(expert * total + number)  # assignments by expert; the keys are distinct
    rank = torch.argsort(order)  # of every assignment in that order

    index = torch.arange(experts, device=x.device)
    counts = (expert[:, None] == index).sum(dim=0)
    block_counts = _divide(counts + size - 1, size)
    begin = _exclusive_sum(counts)  # of every expert in `order`
    block_begin = _exclusive_sum(block_counts)  # of every expert among the blocks

    block = torch.arange(blocks, device=x.device)
    owner = ((block_begin + block_counts) <= block[:, None]).sum(dim=1).clamp(max=experts - 1)  # [blocks]
    within = (block - block_begin[owner])[:, None] * size + torch.arange(size, device=x.device)  # [blocks, size]
    filled = within < counts[owner][:, None]
    source = _divide(order[(begin[owner][:, None] + within).clamp(max=total - 1)], top_k)
    grouped = torch.where(filled[..., None], x[source], 0.0)  # [blocks, size, H]

    wave = max(_MIN_BLOCKS_PER_WAVE, -(-blocks // _MAX_WAVES))
    outputs = []
    for first in range(0, blocks, wave):
        owners = owner[first : first + wave]
        outputs.append(_swiglu(grouped[first : first + wave], gate[owners], up[owners], down[owners]))
    out = torch.cat(outputs).reshape(blocks * size, x.shape[1])
    own = expert.clamp(max=experts - 1)
    place = (block_begin[own] * size + rank - begin[own]).clamp(max=blocks * size - 1)
    return _combine(out[place], chosen, own, weights, x.dtype)


def block_size(assignments: int, experts: int) -> int:
    """Tokens per block: a power of two near the mean load of an expert, so that padding stays near the real work."""
    return min(128, max(4, 1 << max(0, assignments // experts - 1).bit_length()))


def _swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """x [G, M, H] through one expert a group: [G, M, H]."""
    hidden = functional.silu(x @ gate.transpose(1, 2)) * (x @ up.transpose(1, 2))
    return hidden @ down.transpose(1, 2)


def _combine(expert_out: Tensor, chosen: Tensor, own: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """expert_out [N * k, H] -> [N, H]: each token's experts, weighted; `own` [N * k] are the experts that computed
    it.
    """
    weighted = expert_out.reshape(*weights.shape, -1).to(torch.float32) * weights.to(torch.float32)[..., None]
    weighted = torch.where((own.reshape(chosen.shape) == chosen)[..., None], weighted, 0.0)
    return weighted.sum(dim=1).to(dtype)


def _divide(numbers: Tensor, divisor: int) -> Tensor:
    # Truncation equals floor for these, which are never negative, and is a plain integer division.
    return torch.div(numbers, divisor, rounding_mode="trunc")


def _exclusive_sum(counts: Tensor) -> Tensor:
    """Sums of all entries before each one: a product with a triangular matrix, since no compiler lacks that."""
    index = torch.arange(counts.shape[0], device=counts.device)
    before = (index[:, None] > index[None, :]).to(torch.float32)
    return (before @ counts.to(torch.float32)).to(torch.int64)
