"""One period of layers (three GDN, one attention) at the real dimensions of every public model, in float32.

What is smaller than in the model: the vocabulary (4,096) and, in a mixture, the number of experts (16; each token still
goes to as many as in the model). Models of one shape are one case, also where the rotary base differs (5e6 in
Qwen3-Coder-Next, 1e7 in all others).
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nxdi_qwen.modeling.config import FULL_ATTENTION, LINEAR_ATTENTION, ModelConfig
from nxdi_qwen.modeling.presets import PRESETS
from tests.support import TOLERANCE
from tests.true_sizes.measure_gpu import first_layers
from tests.true_sizes.runs import our_side, texts, their_side
from tests.true_sizes.shared_model import build_pair
from tests.true_sizes.verdicts import against

pytestmark = pytest.mark.slow
VOCABULARY, EXPERTS = 4096, 16
PROMPT, STEPS = 65, 4


def period(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(
        first_layers(config, 4),
        vocab_size=VOCABULARY,
        num_experts=min(EXPERTS, config.num_experts),
        rope=dataclasses.replace(config.rope, theta=1e7),
        eos_token_ids=(),
    )


def cases() -> list[object]:
    """Each distinct shape once, the largest first, so that two test processes end together."""
    names: dict[ModelConfig, list[str]] = {}
    for name, config in PRESETS.items():
        names.setdefault(period(config), []).append(name)
    ordered = sorted(names, key=lambda config: config.hidden_size, reverse=True)
    return [pytest.param(config, id="=".join(names[config])) for config in ordered]


@pytest.mark.parametrize("config", cases())
def test_one_period_agrees(config: ModelConfig, request: pytest.FixtureRequest) -> None:
    assert config.layer_types == (LINEAR_ATTENTION,) * 3 + (FULL_ATTENTION,)
    pair = build_pair(config, torch.float32, "cpu")
    (text,) = texts(VOCABULARY, (PROMPT,), None, STEPS)
    result = against(their_side(pair).run(text), our_side(pair, torch.float32), text)
    print(f"{request.node.callspec.id}: rel {result['rel']:.2e} of {PROMPT} tokens and {STEPS} decode steps")
    assert result["rel"] <= TOLERANCE
    assert result["flips"] == 0
