"""The state of a model: what it consists of, and how rows of a batch read and write their slots.

A request owns a slot and a length. An attention layer keeps its keys and values, a GDN layer its recurrent state and
the convolution's last inputs; two tensors a layer, nothing else. One description gives the graphs their inputs and
outputs, and whoever plans memory the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nxdi_qwen.modeling.config import FULL_ATTENTION, ModelConfig
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.partition import (
    SINGLE,
    Cut,
    Parallel,
    key_heads,
    kv_heads,
    put_part,
    take_part,
    value_heads,
)

# Segments of dimension 1, the dimensions behind it, dtype.
_Kind = tuple[tuple[Cut, ...], tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class StateTensor:
    """One tensor of the state: `role` is "key", "value", "recurrent" or "conv"; dimension 0 of `shape` is the slots.

    `shape` is this rank's. Dimension 1 consists of segments one after the other (conv: q, k and v; the others: one),
    and each segment is cut by its own rule.
    """

    name: str
    layer: int
    role: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    segments: tuple[Cut, ...]

    @property
    def bytes_per_slot(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


@dataclass(frozen=True)
class StateDescription:
    """All state tensors in the order in which every graph takes and returns them."""

    slots: int
    max_length: int
    tensors: tuple[StateTensor, ...]

    @property
    def bytes_per_slot(self) -> int:
        return sum(tensor.bytes_per_slot for tensor in self.tensors)

    def allocate(self, device: torch.device | str = "cpu") -> list[Tensor]:
        """Zero-filled tensors. No graph relies on the zeros: a row that starts at length 0 selects its own.

        Raises InputError where there is not enough memory.
        """
        try:
            return [torch.zeros(tensor.shape, dtype=tensor.dtype, device=device) for tensor in self.tensors]
        except RuntimeError as error:
            raise InputError(
                f"the state of {self.slots} requests of up to {self.max_length} tokens, {self.slots} times "
                f"{self.bytes_per_slot:,} bytes, does not fit in memory: take fewer or shorter ones"
            ) from error


def describe_state(
    config: ModelConfig, slots: int, max_length: int, dtype: torch.dtype, parallel: Parallel = SINGLE
) -> StateDescription:
    """The state of `slots` requests of up to `max_length` tokens, per rank; `dtype` is the model's.

    At degree 1: keys and values [slots, Hkv, max_length, head_dim] and conv [slots, 2 Hk dk + Hv dv, kernel - 1] in
    `dtype`, recurrent [slots, Hv, dk, dv] float32: a 16-bit recurrent state drifts within a few hundred steps.
    """
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    channels = (key_heads(config, 1, key_dim), key_heads(config, 1, key_dim), value_heads(config, 1, value_dim))
    cache: _Kind = ((kv_heads(config, 1, 1),), (max_length, config.head_dim), dtype)
    recurrent: _Kind = ((value_heads(config, 1, 1),), (key_dim, value_dim), torch.float32)
    conv: _Kind = (channels, (config.linear_conv_kernel_dim - 1,), dtype)
    tensors = []
    for layer, layer_type in enumerate(config.layer_types):
        attention = layer_type == FULL_ATTENTION
        pair = {"key": cache, "value": cache} if attention else {"recurrent": recurrent, "conv": conv}
        for role, (segments, rest, tensor_dtype) in pair.items():
            shape = (slots, sum(cut.part(parallel).size for cut in segments), *rest)
            tensors.append(StateTensor(f"layers.{layer}.{role}", layer, role, shape, tensor_dtype, segments))
    return StateDescription(slots, max_length, tuple(tensors))


def merge_state(ranks: Sequence[Sequence[Tensor]], description: StateDescription) -> list[Tensor]:
    """The state of degree 1 from that of every rank of another degree, in rank order.

    `description` is the one of degree 1. Zeros that only fill up a rank's part are left out; of what several ranks
    hold, the last one's copy counts.
    """
    merged = []
    for number, tensor in enumerate(description.tensors):
        whole = torch.zeros(tensor.shape, dtype=tensor.dtype)
        for rank, parts in enumerate(ranks):
            parallel = Parallel(len(ranks), rank)
            sizes = [cut.part(parallel).size for cut in tensor.segments]
            places = whole.split([cut.size for cut in tensor.segments], dim=1)
            for cut, place, part in zip(tensor.segments, places, parts[number].split(sizes, dim=1), strict=True):
                put_part(place, part, (cut,), parallel)
        merged.append(whole)
    return merged


def cut_state(state: Sequence[Tensor], description: StateDescription, parallel: Parallel) -> list[Tensor]:
    """A rank's part of a state of degree 1, which `description` describes: the inverse of `merge_state`."""
    result = []
    for whole, tensor in zip(state, description.tensors, strict=True):
        segments = whole.split([cut.size for cut in tensor.segments], dim=1)
        parts = [take_part(part, (cut,), parallel) for cut, part in zip(tensor.segments, segments, strict=True)]
        result.append(torch.cat(parts, dim=1))
    return result


def read_slots(state: Tensor, slots: Tensor | None, start: Tensor) -> Tensor:
    """The rows' own state [B, ...] from `state` [S, ...]; zeros, by selection, for a row that starts a request.

    `slots` [B] (None: row i is slot i); `start` [B] tokens that the slot already holds. A selection keeps out
    whatever the slot's last request left there, NaN included.
    """
    rows = state if slots is None else state.index_select(0, slots)
    return torch.where(_over_rows(start > 0, rows), rows, 0.0)


def write_slots(state: Tensor, rows: Tensor, slots: Tensor | None, active: Tensor) -> Tensor:
    """`state` [S, ...] with the rows [B, ...] of active requests (`active` [B] bool) put into their slots.

    Written as a selection per slot rather than a scatter per row: idle rows write nowhere, whatever slot they name.
    `state` stands in front of `rows`: where the two are laid out differently, torch lays the result out like the
    first, and the next graph takes it as this one took it.
    """
    if slots is None:
        return torch.where(_over_rows(active.logical_not(), state), state, rows)
    named = torch.where(active, slots, -1)
    owner = (named == torch.arange(state.shape[0], device=state.device)[:, None]).to(torch.int64)  # [S, B]
    # The last row that names a slot: NxDI's warm-up names one several times, and no sum of them may be a row's number.
    row = (owner * torch.arange(slots.shape[0], device=state.device)).amax(dim=1)
    return torch.where(_over_rows(owner.sum(dim=1) == 0, state), state, rows.index_select(0, row))


def _over_rows(condition: Tensor, like: Tensor) -> Tensor:
    return condition.reshape(-1, *[1] * (like.dim() - 1))
