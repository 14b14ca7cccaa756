"""Both norms against Hugging Face's modules, and against a formula in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

from nxdi_qwen.modeling.ops.normalization import gated_rms_norm, zero_centered_rms_norm

PLAIN = [modeling_qwen3_next.Qwen3NextRMSNorm, modeling_qwen3_5.Qwen3_5RMSNorm]
GATED = [modeling_qwen3_next.Qwen3NextRMSNormGated, modeling_qwen3_5.Qwen3_5RMSNormGated]
EPS = 1e-3  # large enough to be seen
SIZE = 40


def values(dtype: torch.dtype, seed: int) -> Tensor:
    """Rows of very different size, one of them zero."""
    x = torch.randn(5, 6, SIZE, generator=torch.Generator().manual_seed(seed))
    return (x * torch.tensor([1e-3, 0.0, 0.1, 1.0, 30.0, 1e3])[:, None]).to(dtype)


def module_with(module: Any, weight: Tensor) -> Any:
    module = module(SIZE, eps=EPS)
    module.weight.data = weight
    return module


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("module", PLAIN)
def test_zero_centered(module: Any, dtype: torch.dtype) -> None:
    x, weight = values(dtype, 0), torch.randn(SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = zero_centered_rms_norm(x, weight, EPS)
    assert out.dtype == dtype
    assert torch.equal(out, module_with(module, weight)(x))
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt() * (1 + weight.double())
    torch.testing.assert_close(out.double(), exact, rtol=1e-6 if dtype == torch.float32 else 2**-8, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("module", GATED)
def test_gated(module: Any, dtype: torch.dtype) -> None:
    """The weight is float32 whatever the dtype of the model; a gate far below zero closes, far above it passes."""
    x, gate = values(dtype, 0), torch.randn(5, 6, SIZE, generator=torch.Generator().manual_seed(2)) * 4
    gate[0, 3, :2] = torch.tensor([-200.0, 200.0])
    gate, weight = gate.to(dtype), 1 + 0.3 * torch.randn(SIZE, generator=torch.Generator().manual_seed(3))
    out = gated_rms_norm(x, gate, weight, EPS)
    assert out.dtype == dtype
    assert torch.equal(out, module_with(module, weight)(x, gate))
    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    exact = weight.double() * normed * gate.double() * torch.sigmoid(gate.double())
    torch.testing.assert_close(out.double(), exact, rtol=2e-6 if dtype == torch.float32 else 2**-6, atol=1e-30)
