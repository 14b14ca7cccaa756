"""The state of a model: what it consists of, and how rows of a batch read and write their slots.

A request owns a slot and a length. An attention layer keeps its keys and values, a GDN layer its recurrent state and
the convolution's last inputs; two tensors a layer, nothing else. One description gives the graphs their inputs and
outputs, and whoever plans memory the bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nxdi_qwen.modeling.config import FULL_ATTENTION, ModelConfig
from nxdi_qwen.modeling.parallel import SINGLE, Parallel


@dataclass(frozen=True)
class StateTensor:
    """One tensor of the state: `role` is "key", "value", "recurrent" or "conv"; dimension 0 of `shape` is the slots."""

    name: str
    layer: int
    role: str
    shape: tuple[int, ...]
    dtype: torch.dtype

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
        """Zero-filled tensors. No graph relies on the zeros: a row that starts at length 0 selects its own."""
        return [torch.zeros(tensor.shape, dtype=tensor.dtype, device=device) for tensor in self.tensors]


def describe_state(
    config: ModelConfig, slots: int, max_length: int, dtype: torch.dtype, parallel: Parallel = SINGLE
) -> StateDescription:
    """The state of `slots` requests of up to `max_length` tokens, per rank; `dtype` is the model's.

    Keys and values [slots, Hkv, max_length, head_dim] and conv [slots, 2 Hk dk + Hv dv, kernel - 1] in `dtype`,
    recurrent [slots, Hv, dk, dv] float32: a 16-bit recurrent state drifts within a few hundred steps.
    """
    kv = (slots, parallel.local(config.num_key_value_heads), max_length, config.head_dim)
    recurrent = (
        slots,
        parallel.local(config.linear_num_value_heads),
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )
    conv = (slots, parallel.local(config.conv_dim), config.linear_conv_kernel_dim - 1)
    tensors = []
    pair: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    for layer, kind in enumerate(config.layer_types):
        if kind == FULL_ATTENTION:
            pair = (("key", kv, dtype), ("value", kv, dtype))
        else:
            pair = (("recurrent", recurrent, torch.float32), ("conv", conv, dtype))
        for role, shape, tensor_dtype in pair:
            tensors.append(StateTensor(f"layers.{layer}.{role}", layer, role, shape, tensor_dtype))
    return StateDescription(slots, max_length, tuple(tensors))


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
    """
    if slots is None:
        return torch.where(_over_rows(active, state), rows, state)
    named = torch.where(active, slots, -1)
    owner = (named == torch.arange(state.shape[0], device=state.device)[:, None]).to(torch.int64)  # [S, B]
    row = (owner * torch.arange(slots.shape[0], device=state.device)).sum(dim=1)
    return torch.where(_over_rows(owner.sum(dim=1) > 0, state), rows.index_select(0, row), state)


def _over_rows(condition: Tensor, like: Tensor) -> Tensor:
    return condition.reshape(-1, *[1] * (like.dim() - 1))
