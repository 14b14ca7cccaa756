"""Random weights for a shape without a checkpoint: finite, non-degenerate logits, reproducible tensor by tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.rope_frequencies import rope_inv_freq
from nxdi_qwen.modeling.weights.layout import ROPE, Shape, weight_specs


def random_weights(config: ModelConfig, dtype: torch.dtype, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) in the order of `weight_specs(config, dtype)`.

    Every tensor is drawn in float32 from a generator seeded by `seed` and its own name, then cast: the same seed gives
    the same model in another dtype, up to rounding. Matrices have standard deviation 1 / sqrt(fan in).
    """
    for name, (shape, target) in weight_specs(config, dtype).items():
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        if name == ROPE:
            yield name, rope_inv_freq(config)
        elif len(shape) == 3:
            tensor = torch.empty(shape, dtype=target)
            for expert in tensor:  # one at a time: a float32 copy of all experts of a layer would be large
                expert.copy_(_draw(name, shape[1:], generator))
            yield name, tensor
        else:
            yield name, _draw(name, shape, generator).to(target)


def _draw(name: str, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    if name.endswith(".A_log"):  # with dt_bias: a slow decay, so that the state remembers
        return torch.empty(shape).uniform_(0.01, 1.0, generator=generator).log_()
    if name.endswith(".dt_bias"):
        return torch.empty(shape).uniform_(-6.0, -2.0, generator=generator)
    normal = torch.empty(shape).normal_(generator=generator)
    if name.endswith(".linear_attn.norm.weight"):
        return 1.0 + 0.1 * normal
    if len(shape) == 1:  # zero-centred norms and biases
        return 0.1 * normal
    return normal * shape[-1] ** -0.5
