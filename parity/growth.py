"""How errors grow over the layers of a run, and where they first are more than rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.parity.moe import agreement
from nxdi_qwen.parity.records import Run

# Of the root mean square of a layer's hidden states or of a state. float32: rounding, accumulated over deep models.
FLOAT32_ROUNDING = 1e-4
# bfloat16: times the error of the 16-bit reference at the same place; without one, this.
TIMES_SIXTEEN_BIT = 3.0
BFLOAT16_ROUNDING = 0.1


@dataclass(frozen=True)
class Growth:
    """Relative root mean square errors of one run.

    hidden: [layers + 1, N], 0 for tokens whose experts differ up to there; None where a side has none. states: by name
    [1 + S], or [N] for keys and values. `hidden_allowed` and `states_allowed`: what rounding may make of them.
    flipped: the first layer in which a token's experts differ. What is behind it also carries that token's difference,
    through attention and states, and proves nothing.
    """

    hidden: Tensor | None
    states: dict[str, Tensor]
    hidden_allowed: list[float]
    states_allowed: dict[str, float]
    flipped: int | None

    @classmethod
    def of(cls, reference: Run, target: Run, sixteen_bit: Run | None, config: ModelConfig, dtype: str) -> Growth:
        hidden, states = _agreeing(reference, target, config), state_errors(reference, target)
        layers = 0 if hidden is None else len(hidden)
        differing = (n for n in range(config.num_hidden_layers) if not agreement(reference, target, config, n).all())
        flipped = next(differing, None)
        if dtype == "float32":
            allowed_32 = dict.fromkeys(states, FLOAT32_ROUNDING)
            return cls(hidden, states, [FLOAT32_ROUNDING] * layers, allowed_32, flipped)
        hidden_16 = None if sixteen_bit is None else _agreeing(reference, sixteen_bit, config)
        states_16 = {} if sixteen_bit is None else state_errors(reference, sixteen_bit)
        hidden_allowed = [BFLOAT16_ROUNDING] * layers
        if hidden_16 is not None:
            hidden_allowed = [TIMES_SIXTEEN_BIT * errors.max().item() for errors in hidden_16]
        allowed = {
            name: TIMES_SIXTEEN_BIT * states_16[name].max().item() if name in states_16 else BFLOAT16_ROUNDING
            for name in states
        }
        return cls(hidden, states, hidden_allowed, allowed, flipped)

    @property
    def certain_layer(self) -> int | None:
        """`first_layer`, unless flipped experts may be all that made the difference."""
        layer = self.first_layer
        return layer if layer is None or self.flipped is None or layer <= self.flipped else None

    @property
    def first_layer(self) -> int | None:
        """The first layer whose state or output is beyond rounding."""
        layers = sorted({int(name.split(".")[1]) for name in self.states} | set(range(len(self.hidden_allowed) - 1)))
        for layer in layers:
            if any(not excess <= 1.0 for excess in self._excesses(layer)):
                return layer
        return None

    def first_position(self, layer: int) -> int | None:
        """The first position where what leaves `layer` is beyond rounding."""
        if self.hidden is None:
            return None
        bad = (~(self.hidden[layer + 1] <= self.hidden_allowed[layer + 1])).nonzero()[:, 0]
        return int(bad[0]) if len(bad) else None

    def worst_of(self, layer: int) -> tuple[str, float, float]:
        """The tensor of `layer` that is furthest beyond rounding, its error, and what was allowed."""
        found = [
            (f"{name.split('.')[2]}", values.max().item(), self.states_allowed[name])
            for name, values in self.states.items()
            if int(name.split(".")[1]) == layer
        ]
        if self.hidden is not None:
            found.append(("output", self.hidden[layer + 1].max().item(), self.hidden_allowed[layer + 1]))
        return max(found, key=lambda entry: entry[1] / max(entry[2], 1e-30))

    def _excesses(self, layer: int) -> list[float]:
        own = [
            values.max().item() / max(self.states_allowed[name], 1e-30)
            for name, values in self.states.items()
            if int(name.split(".")[1]) == layer
        ]
        if self.hidden is not None:
            own.append(self.hidden[layer + 1].max().item() / max(self.hidden_allowed[layer + 1], 1e-30))
        return own


def _agreeing(reference: Run, target: Run, config: ModelConfig) -> Tensor | None:
    """`hidden_errors`, 0 for tokens whose experts differ in a layer so far."""
    hidden = hidden_errors(reference, target)
    if hidden is None:
        return None
    same = [agreement(reference, target, config, layer) for layer in range(config.num_hidden_layers)]
    return torch.where(torch.stack([torch.ones_like(same[0]), *same]), hidden, 0.0)


def hidden_errors(reference: Run, target: Run) -> Tensor | None:
    """[layers + 1, N]: of every position, over the root mean square of the layer's hidden states."""
    if reference.hidden is None or target.hidden is None:
        return None
    return torch.stack([_errors(a, e) for a, e in zip(target.hidden, reference.hidden, strict=True)])


def state_errors(reference: Run, target: Run) -> dict[str, Tensor]:
    """By name, of every step (recurrent, conv) or position (key, value)."""
    if reference.states is None or target.states is None:
        return {}
    common = [name for name in reference.states if name in target.states]
    return {name: _errors(target.states[name], reference.states[name]) for name in common}


def _errors(actual: Tensor, expected: Tensor) -> Tensor:
    """[first dimension]"""
    difference = (actual.float() - expected.float()).flatten(1)
    scale = expected.float().square().mean().sqrt().clamp(min=1e-30)
    return torch.nan_to_num(difference.square().mean(dim=1).sqrt() / scale, nan=math.inf, posinf=math.inf)
