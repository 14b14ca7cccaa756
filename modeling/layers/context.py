"""What every layer of one forward pass needs to know about its batch."""

from __future__ import annotations

import enum
from dataclasses import dataclass

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

    `start` [B]: tokens that each row's slot already holds; `lengths` [B]: valid tokens; `valid` [B, T]: the same as a
    mask; `cos`, `sin` [B, T, rotary_dim / 2]; `ends`: the token counts after which a layer returns its state, the
    last one being T; `masks`: the triangles of the chunked rule; `rank` [1] int64: this rank's number.
    """

    way: Way
    start: Tensor
    lengths: Tensor
    valid: Tensor
    cos: Tensor
    sin: Tensor
    ends: tuple[int, ...]
    masks: ChunkMasks
    rank: Tensor

    @classmethod
    def build(
        cls, way: Way, start: Tensor, lengths: Tensor, cos: Tensor, sin: Tensor, ends: tuple[int, ...], rank: Tensor
    ) -> Context:
        """With what follows from the rest: the mask and the triangles."""
        valid = torch.arange(cos.shape[1], device=cos.device) < lengths[:, None]
        return cls(way, start, lengths, valid, cos, sin, ends, ChunkMasks.build(cos.device), rank)
