"""How tests compare tensors. Needs torch alone, so that it serves every environment."""

from __future__ import annotations

import torch
from torch import Tensor


def relative(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest entry of `expected`; NaN anywhere makes it NaN, which no bound lets pass."""
    assert actual.shape == expected.shape
    return ((actual.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def bits(x: Tensor) -> Tensor:
    """`x` as integers: equal exactly if every bit is, NaN included."""
    return x.contiguous().view(torch.int32 if x.element_size() == 4 else torch.int16)
