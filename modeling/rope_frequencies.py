"""Rotary frequencies: the inverse frequency of each rotated pair, default or yarn."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nxdi_qwen.modeling.config import ModelConfig, RopeConfig

# Rotations within the original context at which yarn stops scaling (fast) and scales fully (slow): YaRN, section 3.2.
DEFAULT_BETA_FAST = 32.0
DEFAULT_BETA_SLOW = 1.0


def rope_inv_freq(config: ModelConfig) -> Tensor:
    """Inverse frequencies in radians per position, float32 [rotary_dim / 2], on the CPU.

    "default": `theta ** (-2 i / rotary_dim)` (RoFormer, arXiv 2104.09864). "yarn": low frequencies are divided by
    `factor`, high ones kept, with a linear ramp between (arXiv 2309.00071). The order of operations is that of
    transformers, so that the result equals its buffer bit for bit.
    """
    rope, dim = config.rope, config.rotary_dim
    wavelengths = rope.theta ** (torch.arange(0, dim, 2, device="cpu").float() / dim)
    plain = 1.0 / wavelengths
    if rope.rope_type == "default":
        return plain
    assert rope.factor is not None
    scaled = 1.0 / (rope.factor * wavelengths)
    kept = 1 - _yarn_ramp(rope, dim)
    return scaled * (1 - kept) + plain * kept


def _yarn_ramp(rope: RopeConfig, dim: int) -> Tensor:
    """How far each frequency is scaled: 0 at the high frequencies, 1 at the low ones, float32 [dim / 2]."""
    first = _index_of_rotations(rope, dim, DEFAULT_BETA_FAST if rope.beta_fast is None else rope.beta_fast)
    last = _index_of_rotations(rope, dim, DEFAULT_BETA_SLOW if rope.beta_slow is None else rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0.0), min(last, dim - 1.0)
    if first == last:
        last += 0.001  # a step in place of a division by zero
    return ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - first) / (last - first)).clamp(0, 1)


def _index_of_rotations(rope: RopeConfig, dim: int, rotations: float) -> float:
    """The (fractional) frequency index that turns `rotations` times within the original context."""
    assert rope.original_max_position_embeddings is not None
    wavelength = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
    return dim * math.log(wavelength) / (2 * math.log(rope.theta))


def rope_attention_scaling(config: ModelConfig) -> float:
    """The factor on cos and sin: 1 for "default"; yarn's `attention_factor`, or `0.1 ln(factor) + 1` without one.

    With both `mscale` and `mscale_all_dim` it is `(0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)`.
    """
    rope = config.rope
    if rope.rope_type == "default":
        return 1.0
    if rope.attention_factor is not None:
        return float(rope.attention_factor)
    assert rope.factor is not None
    if rope.mscale and rope.mscale_all_dim:
        return _magnitude(rope.factor, rope.mscale) / _magnitude(rope.factor, rope.mscale_all_dim)
    return _magnitude(rope.factor, 1.0)


def _magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
