"""Grouped-query attention over a slot's KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from nxdi_qwen.modeling.ops.tokens import take_tokens

# Queries whose scores are in memory at once: no tensor grows with the square of the sequence.
QUERY_BLOCK = 512
# How many lengths the keys have that a long prompt's blocks look at. Eight leave 56 % of the work that all keys for all
# queries would be; 50 % is the least, and every further one costs instructions.
KEY_SPANS = 8


def append_to_cache(cache: Tensor, segment: Tensor, start: Tensor, lengths: Tensor) -> Tensor:
    """The cache with the valid tokens of `segment` written behind the first `start` ones.

    `cache` [B, H, L, d]; `segment` [B, T, H, d], valid tokens first; `start`, `lengths` [B]. A selection per cache
    position rather than a scatter: padding has no place to be written to, so it can neither collide nor leak.
    """
    tokens = segment.shape[1]
    offset = torch.arange(cache.shape[2], device=cache.device) - start[:, None]  # [B, L]
    written = (torch.where(offset < 0, tokens, offset) < lengths[:, None])[:, None, :, None]
    if tokens > 1:
        segment = take_tokens(segment, offset.clamp(0, tokens - 1))
    return torch.where(written, segment.transpose(1, 2), cache)


def cached_attention(query: Tensor, key: Tensor, value: Tensor, start: Tensor, lengths: Tensor) -> Tensor:
    """Causal attention of the tokens behind `start` over everything in the cache up to themselves.

    `query` [B, Hq, T, d]; `key`, `value` [B, Hkv, L, d] with this segment already appended; `start`, `lengths` [B].
    Returns [B, T, Hq, d]. Softmax in float32. Cache positions beyond a row's length may hold anything, NaN included.
    """
    length = key.shape[2]
    position = torch.arange(length, device=key.device)
    value = torch.where((position < (start + lengths)[:, None])[:, None, :, None], value, 0.0)
    token_position = start[:, None] + torch.arange(query.shape[2], device=key.device)  # [B, T]
    return _joined(_attention_blocks(query, key, value, token_position))


def segment_attention(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
    """The same for tokens that nothing stands in front of, without a cache: `key`, `value` [B, Hkv, T, d] are the
    segment's own, and queries are given few of the keys that they may not see.
    """
    tokens = query.shape[2]
    position = torch.arange(tokens, device=key.device)
    value = torch.where((position < lengths[:, None])[:, None, :, None], value, 0.0)
    blocks: list[Tensor] = []
    step = -(-tokens // (KEY_SPANS * QUERY_BLOCK)) * QUERY_BLOCK  # whole blocks have a span in common
    for begin in range(0, tokens, step):
        end = min(begin + step, tokens)
        span = key[:, :, :end], value[:, :, :end]
        blocks += _attention_blocks(query[:, :, begin:end], *span, position[None, begin:end])
    return _joined(blocks)


def _joined(blocks: list[Tensor]) -> Tensor:
    return torch.cat(blocks, dim=1) if len(blocks) > 1 else blocks[0]


def _attention_blocks(query: Tensor, key: Tensor, value: Tensor, token_position: Tensor) -> list[Tensor]:
    """The queries, at `token_position` [B, T], or [1, T] where all rows agree, block by block: [B, T of it, Hq, d]."""
    queries, positions = query.split(QUERY_BLOCK, dim=2), token_position.split(QUERY_BLOCK, dim=1)
    return [_attention_block(block, key, value, of_block) for block, of_block in zip(queries, positions, strict=True)]


def _attention_block(query: Tensor, key: Tensor, value: Tensor, token_position: Tensor) -> Tensor:
    """Queries [B, Hq, T, d] whose scores are in memory at once; the rest as in `_attention_blocks`: [B, T, Hq, d]."""
    rows, heads, tokens, dim = query.shape
    kv_heads, length = key.shape[1:3]
    groups = heads // kv_heads
    visible = torch.arange(length, device=key.device) <= token_position[:, :, None]  # [B, T, L]
    scores = torch.bmm(
        query.reshape(rows * kv_heads, groups * tokens, dim), key.reshape(-1, length, dim).transpose(1, 2)
    )
    scores = scores.reshape(rows, heads, tokens, length).to(torch.float32) * dim**-0.5
    # Position 0 is always visible, so no row is empty and the smallest float needs no infinity.
    scores = torch.where(visible[:, None], scores, torch.finfo(torch.float32).min)
    weights = torch.softmax(scores, dim=-1).to(value.dtype)
    out = torch.bmm(weights.reshape(rows * kv_heads, groups * tokens, length), value.reshape(-1, length, dim))
    return out.reshape(rows, heads, tokens, dim).transpose(1, 2)
