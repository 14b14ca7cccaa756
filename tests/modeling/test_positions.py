"""Rotary positions of the whole model against Hugging Face: yarn, and mrope axes that differ from each other."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from tests.comparison import relative
from tests.hf_fixtures import FIXTURES, Spec, hf_model, model_of, prompt_ids, reference_logits
from tests.modeling.ported import batch_of, empty_state, port

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def yarn_model(name: str) -> PreTrainedModel:
    """The fixture with a yarn override, theta and sections kept inside the dictionary."""
    spec = FIXTURES[name]
    return model_of(Spec(spec.family, spec.config | {"rope_parameters": spec.config["rope_parameters"] | YARN}))


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_wide"])
def test_yarn(name: str) -> None:
    """The factor on cos and sin reaches the rotated dimensions only, so it cannot hide in the softmax scale."""
    hf = yarn_model(name)
    ids = prompt_ids(hf, 150)
    expected = reference_logits(hf, ids)
    assert relative(reference_logits(hf_model(name), ids), expected) > 1e-3  # yarn is seen at all
    model = port(hf)
    out = model.prefill(batch_of([ids], [0], slots=[0]), empty_state(model, 1, 200))
    assert relative(model.head(out.hidden)[0], expected) <= 1e-5


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_wide", "qwen3_5_moe"])
def test_position_and_cache_slot_differ(name: str) -> None:
    """An image in the prompt: time stands still, height and width count, text goes on behind the largest."""
    hf = hf_model(name)
    ids = prompt_ids(hf, 80)
    image = torch.arange(36)
    text = torch.arange(20)
    positions = torch.cat(
        [
            text.expand(3, -1),
            torch.stack([image * 0, image // 6, image % 6]) + 20,
            text.repeat(2)[:24].expand(3, -1) + 26,
        ],
        dim=1,
    )[:, None]
    expected = hf(input_ids=ids[None], position_ids=positions, use_cache=False).logits[0]
    assert relative(reference_logits(hf, ids), expected) > 1e-3  # the positions are seen at all
    model = port(hf)
    batch = batch_of([ids], [0], slots=[0])._replace(rope_positions=positions)
    out = model.prefill(batch, empty_state(model, 1, 200))
    assert relative(model.head(out.hidden)[0], expected) <= 1e-5
