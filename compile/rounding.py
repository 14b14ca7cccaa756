"""The steps between floating-point numbers."""

from __future__ import annotations

import math

import torch


def dtype_step(value: float, dtype: torch.dtype) -> float:
    """The distance of neighbouring values of `dtype` at `value`."""
    _, exponent = math.frexp(abs(value))
    return torch.finfo(dtype).eps * 2.0 ** (exponent - 1)
