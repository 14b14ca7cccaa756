"""Small runs made of nothing but numbers."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.parity.records import Prompt, Run
from tests.support import loaded_fixture

TOKENS, STEPS, VOCAB = 8, 4, 1200


@functools.cache
def _logits() -> Tensor:
    return torch.randn(TOKENS + STEPS, VOCAB, generator=torch.Generator().manual_seed(0))


def logits() -> Tensor:
    """[12, 1200] float32, always the same."""
    return _logits().clone()


def noisy(size: float, seed: int) -> Tensor:
    noise = torch.randn(TOKENS + STEPS, VOCAB, generator=torch.Generator().manual_seed(seed))
    return logits() + size * noise


def run(values: Tensor | None = None, **fields: object) -> Run:
    """A run of 8 prompt tokens and 4 forced ones with these logits, by default `logits`."""
    prompt = Prompt("small", tuple(range(TOKENS)))
    own = logits() if values is None else values
    return Run(prompt, tuple(range(STEPS)), logits=own, **fields)  # type: ignore[arg-type]


def config(moe: bool = False) -> ModelConfig:
    """A dense model, or one whose layers 1 and 3 are sparse."""
    own = loaded_fixture("qwen3_next_mixed" if moe else "qwen3_5").config
    if not moe:
        return own
    fields = own.to_dict() | {"moe_layers": (False, True, False, True), "num_hidden_layers": 4}
    return ModelConfig.from_dict(fields | {"layer_types": own.layer_types[:4]})
