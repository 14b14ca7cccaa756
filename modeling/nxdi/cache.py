"""The hybrid state as NxDI's cache manager: two parameters a layer, keys and values only where there is attention.

The managers hand a graph the rows of its batch and put the new rows back. Everything is a function of the state
parameters, which NxDI makes inputs and aliased outputs of every graph.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from neuronx_distributed_inference.models.config import InferenceConfig
from neuronx_distributed_inference.modules.kvcache.kv_cache_manager import KVCacheManager
from torch import Tensor, nn

from nxdi_qwen.modeling.state import StateDescription, StateTensor, read_slots, write_slots

_CACHE = ("key", "value")


def in_blocks(description: StateDescription, blocks: int, size: int) -> StateDescription:
    """The same state with the keys and values of all requests in `blocks` blocks of `size` tokens, not in slots."""
    tensors = (
        replace(tensor, shape=(blocks, tensor.shape[1], size, tensor.shape[3])) if tensor.role in _CACHE else tensor
        for tensor in description.tensors
    )
    return replace(description, tensors=tuple(tensors))


class HybridCacheManager(KVCacheManager):
    """State of whole slots: keys and values [slots, Hkv, L, d], recurrent [slots, Hv, dk, dv], conv [slots, C, K - 1].

    `get_cache` and `update_cache` take, beside what NxDI passes, `seq_ids` [B] (slots; distinct among active rows),
    `start` [B] (tokens that the slot already holds), `lengths` [B] (tokens that this pass adds; 0 for an idle row) and
    `seq_len`, the cache positions that the pass can see.
    """

    def __init__(self, config: InferenceConfig, description: StateDescription) -> None:
        self.description = description  # before the base class, which asks for the shapes
        layers = len(description.tensors) // 2
        super().__init__(
            config, config.num_key_value_heads, layer_to_cache_size_mapping=[description.max_length] * layers
        )
        # The base class makes all of them in one dtype.
        for number, tensor in enumerate(description.tensors):
            if self.past_key_values[number].dtype != tensor.dtype:
                zeros = torch.zeros(tensor.shape, dtype=tensor.dtype)
                self.past_key_values[number] = nn.Parameter(zeros, requires_grad=False)

    def _init_kv_shape(self, config: InferenceConfig, layer_to_cache_size_mapping: list[int] | None = None) -> None:
        shapes = [tensor.shape for tensor in self.description.tensors]
        self.k_shapes, self.v_shapes = shapes[0::2], shapes[1::2]
        self.padded_layer_ids: list[int] = []

    def get_kv_by_layer_id(
        self, idx: int, *, seq_ids: Tensor, start: Tensor, seq_len: int, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        first, second = (
            self._read(tensor, state, seq_ids=seq_ids, start=start, seq_len=seq_len, **kwargs)
            for tensor, state in self._of_layer(idx)
        )
        return first, second

    def update_kv_by_layer_id(
        self, idx: int, *, kv_per_layer: tuple[Tensor, Tensor], **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        first, second = (
            self._write(tensor, state, rows, **kwargs)
            for (tensor, state), rows in zip(self._of_layer(idx), kv_per_layer, strict=True)
        )
        return first, second

    def _of_layer(self, idx: int) -> list[tuple[StateTensor, Tensor]]:
        return [(self.description.tensors[n], self.past_key_values[n]) for n in (2 * idx, 2 * idx + 1)]

    def _read(
        self, tensor: StateTensor, state: Tensor, *, seq_ids: Tensor, start: Tensor, seq_len: int, **_: Any
    ) -> Tensor:
        visible = state[:, :, :seq_len] if tensor.role in _CACHE else state
        return read_slots(visible, seq_ids.clamp(min=0), start)

    def _write(
        self,
        tensor: StateTensor,
        state: Tensor,
        rows: Tensor,
        *,
        seq_ids: Tensor,
        lengths: Tensor,
        seq_len: int,
        **_: Any,
    ) -> Tensor:
        active = lengths > 0
        if tensor.role not in _CACHE or seq_len >= state.shape[2]:
            return write_slots(state, rows, seq_ids, active)
        written = write_slots(state[:, :, :seq_len], rows, seq_ids, active)
        return torch.cat([written, state[:, :, seq_len:]], dim=2)


class HybridBlockCacheManager(HybridCacheManager):
    """Keys and values in blocks [blocks, Hkv, block, d] that a request's `block_table` [B, n] lists in order.

    The states of GDN layers stay in slots. A block that several requests share is read by all and written by none, as
    long as it lies in front of their `start`.
    """

    def _read(
        self,
        tensor: StateTensor,
        state: Tensor,
        *,
        seq_ids: Tensor,
        start: Tensor,
        seq_len: int,
        block_table: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        if tensor.role not in _CACHE:
            return super()._read(tensor, state, seq_ids=seq_ids, start=start, seq_len=seq_len)
        assert block_table is not None
        rows, count = block_table.shape
        heads, size, dim = tensor.shape[1:]
        blocks = state.index_select(0, block_table.reshape(-1)).reshape(rows, count, heads, size * dim)
        cache = blocks.transpose(1, 2).reshape(rows, heads, count * size, dim)
        return torch.where((start > 0).reshape(-1, 1, 1, 1), cache, 0.0)

    def _write(
        self,
        tensor: StateTensor,
        state: Tensor,
        rows: Tensor,
        *,
        seq_ids: Tensor,
        lengths: Tensor,
        seq_len: int,
        start: Tensor | None = None,
        block_table: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        if tensor.role not in _CACHE:
            return super()._write(tensor, state, rows, seq_ids=seq_ids, lengths=lengths, seq_len=seq_len)
        assert block_table is not None and start is not None
        batch, count = block_table.shape
        heads, size, dim = tensor.shape[1:]
        blocks = rows.reshape(batch, heads, count, size * dim).transpose(1, 2).reshape(-1, heads, size, dim)
        begin = torch.arange(count, device=state.device) * size  # the first token of each block
        # An idle row names blocks of others, and with no tokens it would still touch the block that `start` lies in.
        touched = (begin + size > start[:, None]) & (begin < (start + lengths)[:, None]) & (lengths > 0)[:, None]
        return write_slots(state, blocks, block_table.reshape(-1), touched.reshape(-1))
