"""NaN and infinities: the first one of a run, in the order of computation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nxdi_qwen.parity.records import Run
from nxdi_qwen.parity.result import NonFinite

_PER_STEP = ("recurrent", "conv")  # states with an entry for every step, where caches have one for every position

# What orders findings: step, layer (the embedding before, the logits behind all), states before hidden states, index.
_Order = tuple[int, float, int, int]


def first_non_finite(run: Run, side: str) -> NonFinite | None:
    """The earliest of a run; None where every value is finite. `side` is the name for it in reports."""
    found: list[tuple[_Order, NonFinite]] = []
    tokens = len(run.prompt.ids)

    def look(name: str, values: Tensor, layer: int | None, rank: float, per_step: bool = False) -> None:
        """`values` [N or 1 + S, ...]"""
        bad = ~torch.isfinite(values)
        if not bad.any():
            return
        index = int(bad.flatten(1).any(dim=1).nonzero()[0, 0])
        step = index if per_step else max(0, index - tokens + 1)
        value = "NaN" if torch.isnan(values[index]).any() else "inf"
        entry = NonFinite(side, name, layer, step, None if per_step else index, value, int(bad.sum()))
        found.append(((step, rank, name == "hidden states", index), entry))

    for name, tensor in (run.states or {}).items():
        _, layer, role = name.split(".")
        per_step = role in _PER_STEP
        look(f"{role} {'state' if per_step else 'cache'}", tensor, int(layer), int(layer), per_step)
    if run.hidden is not None:
        look("embedding", run.hidden[0], None, -1)
        for number, values in enumerate(run.hidden[1:]):
            look("hidden states", values, number, number)
    if run.logits is not None:
        look("logits", run.logits, None, math.inf)
    if run.top is not None:
        look("logprobs", torch.where(run.top.ids < 0, 0.0, run.top.logprobs), None, math.inf)
    return min(found, key=lambda pair: pair[0])[1] if found else None
