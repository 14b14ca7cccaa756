"""Partial rotary embedding with interleaved mrope sections."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_cos_sin(
    positions: Tensor, inv_freq: Tensor, mrope_section: tuple[int, ...] | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Cosine and sine [B, T, rotary_dim / 2] float32 for `positions` [3, B, T] (time, height, width; equal for text).

    Interleaved mrope: frequency i belongs to axis i % 3 as long as that axis' section lasts, and to time beyond it.
    `scaling` is yarn's factor on both.
    """
    angles = positions[0].to(torch.float32)[..., None] * inv_freq
    if mrope_section is not None:
        count = inv_freq.shape[0]
        index = torch.arange(count, device=inv_freq.device)
        turn = torch.arange(3, device=inv_freq.device).repeat(-(-count // 3))[:count]
        for axis in (1, 2):
            chosen = torch.where(turn == axis, index, count) < min(count, 3 * mrope_section[axis])
            angles = torch.where(chosen, positions[axis].to(torch.float32)[..., None] * inv_freq, angles)
    return torch.cos(angles) * scaling, torch.sin(angles) * scaling


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first ``2 * cos.shape[-1]`` dimensions of `x` [B, T, H, d] (half-split pairs), in float32."""
    half = cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]
    first = x[..., :half].to(torch.float32)
    second = x[..., half : 2 * half].to(torch.float32)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated.to(x.dtype), x[..., 2 * half :]], dim=-1)
