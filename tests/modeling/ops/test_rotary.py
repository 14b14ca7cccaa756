"""Rotary embedding against Hugging Face's modules, also where time, height and width positions differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

from nxdi_qwen.modeling.ops.rotary import apply_rotary, rotary_cos_sin
from tests.hf_fixtures import hf_model

# The sections (2, 1, 1) of four frequencies, and the real (11, 11, 10) of 32.
MROPE = ["qwen3_5", "qwen3_5_wide"]


def hf_rotated(name: str, module: Any, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """q, k [B, T, H, d] rotated by Hugging Face's rotary module of a fixture, and its function."""
    cos, sin = hf_model(name).model.rotary_emb(q, positions)
    q, k = module.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2)


def make(name: str) -> tuple[Tensor, Tensor, Any, Tensor]:
    """q, k [3, 20, heads, d], the configuration, and the frequencies."""
    config = hf_model(name).config
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 20, config.num_attention_heads, config.head_dim, generator=generator)
    k = torch.randn(3, 20, config.num_key_value_heads, config.head_dim, generator=generator)
    return q, k, config, hf_model(name).model.rotary_emb.inv_freq


def test_text() -> None:
    q, k, _, inv_freq = make("qwen3_next")
    positions = torch.arange(20) + torch.tensor([0, 100, 3000])[:, None]
    cos, sin = rotary_cos_sin(positions.expand(3, -1, -1), inv_freq, None, 1.0)
    expected_q, expected_k = hf_rotated("qwen3_next", modeling_qwen3_next, q, k, positions)
    torch.testing.assert_close(apply_rotary(q, cos, sin), expected_q, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(apply_rotary(k, cos, sin), expected_k, rtol=1e-6, atol=1e-6)
    assert torch.equal(apply_rotary(q, cos, sin)[..., 8:], q[..., 8:]), "a quarter of the head is rotated"


@pytest.mark.parametrize("axes", ["equal", "different"])
@pytest.mark.parametrize("name", MROPE)
def test_mrope(name: str, axes: str) -> None:
    q, k, config, inv_freq = make(name)
    generator = torch.Generator().manual_seed(1)
    positions = torch.randint(0, 4000, (3, 3, 20), generator=generator)
    if axes == "equal":
        positions = positions[:1].expand(3, -1, -1)
    cos, sin = rotary_cos_sin(positions, inv_freq, tuple(config.rope_parameters["mrope_section"]), 1.0)
    expected_q, expected_k = hf_rotated(name, modeling_qwen3_5, q, k, positions)
    torch.testing.assert_close(apply_rotary(q, cos, sin), expected_q, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(apply_rotary(k, cos, sin), expected_k, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("section", [(0, 5, 3), (2, 3, 3), (8, 0, 0), (6, 1, 1), (1, 1, 6), (3, 5, 0)], ids=str)
def test_any_section(section: tuple[int, int, int]) -> None:
    """Against the module with other sections in it: those that end early, those longer than their turns."""
    config = hf_model("qwen3_5").config.__class__(
        head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    )
    config.rope_parameters["mrope_section"] = list(section)
    module = modeling_qwen3_5.Qwen3_5TextRotaryEmbedding(config)
    positions = torch.randint(0, 4000, (3, 2, 9), generator=torch.Generator().manual_seed(2))
    cos, sin = rotary_cos_sin(positions, module.inv_freq, section, 1.0)
    expected_cos, expected_sin = module(torch.zeros(1), positions)
    torch.testing.assert_close(cos, expected_cos[..., :8], rtol=0, atol=1e-6)
    torch.testing.assert_close(sin, expected_sin[..., :8], rtol=0, atol=1e-6)


def test_scaling_multiplies_the_rotated_dims_only() -> None:
    q, _, _, inv_freq = make("qwen3_next")
    positions = torch.arange(20).expand(3, 3, -1)
    plain = apply_rotary(q, *rotary_cos_sin(positions, inv_freq, None, 1.0))
    scaled = apply_rotary(q, *rotary_cos_sin(positions, inv_freq, None, 1.5))
    torch.testing.assert_close(scaled[..., :8], 1.5 * plain[..., :8])
    assert torch.equal(scaled[..., 8:], q[..., 8:])


def test_bfloat16_rotates_in_float32() -> None:
    """Angles of long positions need float32; the result is rounded once."""
    q, _, _, inv_freq = make("qwen3_next")
    cos, sin = rotary_cos_sin((torch.arange(20) + 3000).expand(3, 3, -1), inv_freq, None, 1.0)
    rotated = apply_rotary(q.bfloat16(), cos, sin)
    assert cos.dtype == sin.dtype == torch.float32
    assert torch.equal(rotated, apply_rotary(q.bfloat16().float(), cos, sin).bfloat16())
