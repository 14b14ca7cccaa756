"""The two root-mean-square norms of the family."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def zero_centered_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * (1 + weight)`` over the last dimension, in float32, back in the dtype of `x`."""
    return (_rms_normalize(x, eps) * (1.0 + weight.to(torch.float32))).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * (x / rms(x)) * silu(gate)`` over the last dimension: the GDN output norm.

    `x` and `gate` [..., d] in the model's dtype, `weight` [d]. As in the reference, the normalised `x` is rounded to
    the model's dtype before the weight is applied; weight and silu are float32.
    """
    normed = _rms_normalize(x, eps).to(x.dtype).to(torch.float32) * weight.to(torch.float32)
    return (normed * functional.silu(gate.to(torch.float32))).to(x.dtype)


def _rms_normalize(x: Tensor, eps: float) -> Tensor:
    x = x.to(torch.float32)
    return x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + eps)
