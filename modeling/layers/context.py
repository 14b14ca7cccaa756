"""What every layer of one forward pass needs to know about its batch."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nxdi_qwen.modeling.ops.gated_delta import ChunkMasks

LayerState = tuple[Tensor, Tensor]


class Way(enum.Enum):
    """The three ways through a model: many tokens in chunks, one token, or a few with the state after each."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"


@dataclass(frozen=True)
class Context:
    """One forward pass over B rows of T tokens, valid tokens first.

    `start` [B]: tokens that each row's slot already holds; `lengths` [B]: valid tokens; `cos`, `sin` [B, T,
    rotary_dim / 2]; `ends`: the token counts after which a layer returns its state, the last one being T; `rank` [1]
    int64: this rank's number; `fresh`: `start` is 0 in every row, and layers need not look at what slots hold. What
    follows from these is made when a layer first asks for it, once for all layers, so that no graph holds what it does
    not need.
    """

    way: Way
    start: Tensor
    lengths: Tensor
    cos: Tensor
    sin: Tensor
    ends: tuple[int, ...]
    rank: Tensor
    fresh: bool = False

    @cached_property
    def valid(self) -> Tensor:
        """[B, T] bool: `lengths` as a mask."""
        return torch.arange(self.cos.shape[1], device=self.cos.device) < self.lengths[:, None]

    @cached_property
    def active(self) -> Tensor:
        """[B] bool: rows that have a valid token."""
        return self.lengths > 0

    @cached_property
    def masks(self) -> ChunkMasks:
        """The triangles of the chunked rule."""
        return ChunkMasks.build(self.cos.device)
