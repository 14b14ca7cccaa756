"""Tokens that flip because two logits are equal to rounding, told apart from those that flip for a reason."""

from __future__ import annotations

import torch
from torch import Tensor

from nxdi_qwen.compile.rounding import dtype_step
from nxdi_qwen.compile.source import DTYPES
from nxdi_qwen.parity.records import Run
from nxdi_qwen.parity.result import DECODE, PREFILL, TokenFlip


def top1(run: Run) -> Tensor:
    """[N] int64: the best token of every position; -1 where a server gave none."""
    if run.logits is not None:
        return run.logits.argmax(dim=-1)
    assert run.top is not None
    return run.top.ids[:, 0]


def margins(logits: Tensor) -> Tensor:
    """[N]: the best less the second best logit."""
    best = logits.topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]


def token_flips(reference: Run, target: Run, dtype: str) -> list[TokenFlip]:
    """Every position where the best tokens differ; `dtype` is the target's ("unknown" is taken for bfloat16)."""
    assert reference.logits is not None
    expected, actual, margin = reference.logits.argmax(dim=-1), top1(target), margins(reference.logits)
    flips = []
    for position in ((expected != actual) & (actual >= 0)).nonzero()[:, 0].tolist():
        best = reference.logits[position, expected[position]].item()
        step = dtype_step(best, DTYPES.get(dtype, torch.bfloat16))
        own = margin[position].item()
        phase = PREFILL if position < len(reference.prompt.ids) else DECODE
        flips.append(TokenFlip(position, phase, int(expected[position]), int(actual[position]), own, step, own < step))
    return flips
