"""What vLLM's hybrid KV cache manager is told: the true state of every layer, per rank, and blocks that fit it.

vLLM keeps one pool of blocks of equal bytes. An attention layer fills one block after the other as a request grows; a
GDN layer needs one block a request, whatever its length, which is what a block size of the maximum length says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from vllm.config import CacheConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, KVCacheSpec

from nxdi_qwen.modeling.state import StateDescription, StateTensor
from nxdi_qwen.serving import versions

ALIGNMENT = 16
"""Tokens: attention blocks are a multiple of it."""


@dataclass(frozen=True)
class Blocks:
    """`tokens` in an attention block, and the `page_bytes` of any layer's block."""

    tokens: int
    page_bytes: int


def choose_blocks(description: StateDescription, alignment: int = ALIGNMENT) -> Blocks:
    """The smallest attention block, a multiple of `alignment` tokens, whose page holds a GDN layer's state."""
    state_bytes = max((_bytes(pair) for pair in _layers(description) if not _is_attention(pair)), default=0)
    token_bytes = max((_token_bytes(pair) for pair in _layers(description) if _is_attention(pair)), default=0)
    if not token_bytes:
        return Blocks(alignment, state_bytes)
    tokens = alignment * max(1, math.ceil(state_bytes / (alignment * token_bytes)))
    return Blocks(tokens, tokens * token_bytes)


def kv_cache_specs(
    description: StateDescription, *, block_size: int, mamba_block_size: int, page_size_padded: int
) -> dict[str, KVCacheSpec]:
    """One specification a layer of a rank's state, in layer order.

    `layers.{i}.self_attn`: keys and values of `block_size` tokens. `layers.{i}.linear_attn`: conv (K - 1, channels) in
    the model's dtype and recurrent (Hv, dv, dk) float32, vLLM's order of both, in a page of `page_size_padded` bytes;
    one block for every `mamba_block_size` tokens.
    """
    specs: dict[str, KVCacheSpec] = {}
    for pair in _layers(description):
        first = pair[0]
        if _is_attention(pair):
            heads, _, head_dim = first.shape[1:]
            specs[f"layers.{first.layer}.self_attn"] = FullAttentionSpec(
                block_size=block_size, num_kv_heads=heads, head_size=head_dim, dtype=first.dtype
            )
        else:
            tensors = _conv_and_recurrent(pair)
            specs[f"layers.{first.layer}.linear_attn"] = versions.mamba_spec(
                shapes=tuple(shape for shape, _ in tensors),
                dtypes=tuple(dtype for _, dtype in tensors),
                block_size=mamba_block_size,
                page_size_padded=page_size_padded,
            )
    return specs


def set_blocks(cache: CacheConfig, description: StateDescription, length: int, alignment: int = ALIGNMENT) -> None:
    """Makes vLLM count blocks that fit the state: of attention layers by `choose_blocks`, one of a GDN layer for a
    request of up to `length` tokens.
    """
    blocks = choose_blocks(description, alignment)
    cache.block_size, cache.mamba_block_size = blocks.tokens, length
    cache.mamba_page_size_padded = blocks.page_bytes


def specs_in_blocks(description: StateDescription, cache: CacheConfig) -> dict[str, KVCacheSpec]:
    """`kv_cache_specs` in the blocks that `set_blocks` chose."""
    return kv_cache_specs(
        description,
        block_size=cache.block_size,
        mamba_block_size=cache.mamba_block_size,
        page_size_padded=cache.mamba_page_size_padded,
    )


def state_shapes(description: StateDescription) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """(shape, dtype) of conv and recurrent, in the order and layout of `kv_cache_specs`; GDN layers are alike."""
    return next(_conv_and_recurrent(pair) for pair in _layers(description) if not _is_attention(pair))


def blocks_of_request(groups: Iterable[KVCacheGroupSpec], tokens: int) -> int:
    """Blocks of the pool that a request of `tokens` tokens takes, over all groups of layers."""
    return sum(math.ceil(tokens / group.kv_cache_spec.block_size) for group in groups)


def pool_bytes(groups: Iterable[KVCacheGroupSpec], requests: int, tokens: int) -> int:
    """Bytes of the pool that holds exactly `requests` requests of `tokens` tokens, and vLLM's block of nothing."""
    groups = list(groups)
    block_bytes = max(len(group.layer_names) * group.kv_cache_spec.page_size_bytes for group in groups)
    return (requests * blocks_of_request(groups, tokens) + 1) * block_bytes


def _layers(description: StateDescription) -> list[tuple[StateTensor, StateTensor]]:
    tensors = description.tensors
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def _is_attention(pair: tuple[StateTensor, StateTensor]) -> bool:
    return pair[0].role in ("key", "value")


def _conv_and_recurrent(
    pair: tuple[StateTensor, StateTensor],
) -> tuple[tuple[tuple[int, ...], torch.dtype], tuple[tuple[int, ...], torch.dtype]]:
    recurrent, conv = pair if pair[0].role == "recurrent" else pair[::-1]
    (channels, tail), (heads, key_dim, value_dim) = conv.shape[1:], recurrent.shape[1:]
    return ((tail, channels), conv.dtype), ((heads, value_dim, key_dim), recurrent.dtype)


def _bytes(pair: tuple[StateTensor, StateTensor]) -> int:
    return sum(tensor.bytes_per_slot for tensor in pair)


def _token_bytes(pair: tuple[StateTensor, StateTensor]) -> int:
    """Keys and values of one token in one layer."""
    key = pair[0]
    return 2 * key.shape[1] * key.shape[3] * torch.empty((), dtype=key.dtype).element_size()
