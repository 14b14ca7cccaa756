"""Random weights for a shape without a checkpoint: finite, non-degenerate logits, reproducible tensor by tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.weights.blocks import Block, rows_in_block
from nxdi_qwen.modeling.weights.layout import DERIVED, Shape, weight_dtype, weight_shapes


def random_blocks(config: ModelConfig, dtype: torch.dtype, seed: int) -> Iterator[Block]:
    """Every row of every parameter, in the order of `weight_specs(config, dtype)`.

    Every tensor is drawn in float32 from a generator seeded by `seed` and its own name, then cast: the same seed gives
    the same model in another dtype, up to rounding. Matrices have standard deviation 1 / sqrt(fan in).
    """
    for name, shape in weight_shapes(config).items():
        if name in DERIVED:
            continue
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        experts = [(expert,) for expert in range(shape[0])] if len(shape) == 3 else [()]
        matrix = shape[1:] if len(shape) == 3 else shape
        step = rows_in_block(matrix)
        for expert in experts:
            for row in range(0, matrix[0], step):
                rows = min(step, matrix[0] - row)
                data = _draw(name, (rows, *matrix[1:]), generator).to(weight_dtype(name, dtype))
                yield Block(name, (*expert, row), data[None] if expert else data)


def _draw(name: str, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    if name.endswith(".A_log.weight"):  # with dt_bias: a slow decay, so that the state remembers
        return torch.empty(shape).uniform_(0.01, 1.0, generator=generator).log_()
    if name.endswith(".dt_bias.weight"):
        return torch.empty(shape).uniform_(-6.0, -2.0, generator=generator)
    normal = torch.empty(shape).normal_(generator=generator)
    if name.endswith(".linear_attn.norm.weight"):
        return normal.mul_(0.1).add_(1.0)
    if len(shape) == 1:  # zero-centred norms and biases
        return normal.mul_(0.1)
    return normal.mul_(shape[-1] ** -0.5)
