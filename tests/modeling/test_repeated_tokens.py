"""Prompts that repeat: equal keys make a chunk's triangular system as badly conditioned as it gets.

Hugging Face's chunked and step-by-step forms themselves differ by 1e-5 here, so the measure is a float64 twin.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from nxdi_qwen.modeling.state import describe_state
from tests.comparison import relative
from tests.hf_fixtures import hf_model, reference_logits, reference_steps
from tests.modeling.ported import batch_of, empty_state, ported_model, step_by_step
from tests.twin import TwinModel, TwinOutput

LENGTH = 300
PROMPTS = {"one token": torch.tensor([17] * LENGTH), "two tokens": torch.tensor([17, 200] * (LENGTH // 2))}
NAMES = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]

pytestmark = [pytest.mark.parametrize("prompt", PROMPTS), pytest.mark.parametrize("name", NAMES)]


@dataclass(frozen=True)
class Run:
    """Logits [T, V] of this package's chunked form, and the state after the prompt."""

    logits: Tensor
    state: list[Tensor]


@functools.cache
def prefilled(name: str, prompt: str) -> Run:
    model = ported_model(name)
    out = model.prefill(batch_of([PROMPTS[prompt]], [0]), empty_state(model, 1, LENGTH))
    return Run(model.head(out.hidden)[0], out.state)


@functools.cache
def twin(name: str, prompt: str) -> TwinOutput:
    return TwinModel(hf_model(name))(PROMPTS[prompt])


def test_logits(name: str, prompt: str) -> None:
    ids, exact, run = PROMPTS[prompt], twin(name, prompt).logits, prefilled(name, prompt)
    chunked = relative(reference_logits(hf_model(name), ids), exact)
    steps = relative(reference_steps(hf_model(name), ids[:1], ids[1:]).logits, exact)
    ours = relative(run.logits, exact)
    print(f"\n{name}, {prompt}: Hugging Face chunked {chunked:.1e}, step by step {steps:.1e}; ours {ours:.1e}")
    assert ours <= max(1e-5, 3 * max(chunked, steps))


def test_state(name: str, prompt: str) -> None:
    """Finite, and equal to the step-by-step form and to the twin's."""
    model, run, exact = ported_model(name), prefilled(name, prompt), twin(name, prompt)
    _, states = step_by_step(model, PROMPTS[prompt], empty_state(model, 1, LENGTH))
    description = describe_state(model.config, 1, LENGTH, torch.float32)
    for tensor, chunked, stepped in zip(description.tensors, run.state, states[-1], strict=True):
        assert chunked.isfinite().all(), tensor.name
        assert relative(chunked, stepped) <= 1e-5, tensor.name
        assert relative(chunked[0], getattr(exact, tensor.role)[tensor.layer]) <= 1e-5, tensor.name
