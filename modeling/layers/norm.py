"""The norm of blocks, queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nxdi_qwen.modeling.ops.normalization import zero_centered_rms_norm
from nxdi_qwen.modeling.parallel import partition
from nxdi_qwen.modeling.partition import SINGLE


class ZeroCenteredRMSNorm(nn.Module):
    """RMS norm over the last dimension whose stored weight is the difference from one."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = partition((size,), (), SINGLE, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return zero_centered_rms_norm(x, self.weight, self.eps)
