"""The states of one slot, step by step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nxdi_qwen.modeling.state import StateDescription

# What a slot keeps of every token; the other roles hold the state after the last one.
_CACHES = ("key", "value")


class StateLog:
    """Copies what `Run.states` needs of a whole state, after the prompt and after every step."""

    def __init__(self, description: StateDescription, slot: int) -> None:
        self._description = description
        self._slot = slot
        self._steps: dict[str, list[Tensor]] = {}
        self._last: Sequence[Tensor] = ()

    def add(self, state: Sequence[Tensor]) -> None:
        """`state`: all tensors in the description's order."""
        for described, tensor in zip(self._description.tensors, state, strict=True):
            if described.role not in _CACHES:
                self._steps.setdefault(described.name, []).append(tensor[self._slot].clone())
        self._last = state

    def states(self, total: int) -> dict[str, Tensor]:
        """As in `Run`, for `total` tokens in the slot."""
        states = {name: torch.stack(steps) for name, steps in self._steps.items()}
        for described, tensor in zip(self._description.tensors, self._last, strict=True):
            if described.role in _CACHES:
                states[described.name] = tensor[self._slot, :, :total].transpose(0, 1).clone()
        return states
