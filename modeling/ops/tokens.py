"""Choosing tokens of each row."""

from __future__ import annotations

import torch
from torch import Tensor


def take_tokens(x: Tensor, index: Tensor) -> Tensor:
    """The tokens `index` [B, N] of every row's own: `x` [B, T, ...] -> [B, N, ...].

    As a choice among the rows of a matrix: `torch.gather` would need an index for every single element, which lowered
    graphs hold in memory with one dimension more than `x`.
    """
    rows, tokens = x.shape[:2]
    flat = torch.arange(rows, device=x.device)[:, None] * tokens + index
    chosen = x.reshape(rows * tokens, -1).index_select(0, flat.reshape(-1))
    return chosen.reshape(rows, index.shape[1], *x.shape[2:])
