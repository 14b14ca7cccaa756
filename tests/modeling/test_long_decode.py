"""Rounding does not pile up: the state after 2,000 decode steps is as good as Hugging Face's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from nxdi_qwen.modeling.model import HybridCausalLM
from tests.comparison import relative
from tests.hf_fixtures import hf_model
from tests.modeling.ported import batch_of, empty_state, port
from tests.twin import TwinModel

STEPS = 2000


def first_layers(name: str, count: int) -> Any:
    """The fixture cut to its first layers, which keeps the steps short."""
    model = copy.deepcopy(hf_model(name))
    model.model.layers = model.model.layers[:count]
    model.config.num_hidden_layers = count
    model.config.layer_types = model.config.layer_types[:count]
    return model


def decoded(model: HybridCausalLM, prompts: torch.Tensor) -> dict[int, torch.Tensor]:
    """The recurrent states after decoding each row of `prompts` from nothing, by layer."""
    state = empty_state(model, len(prompts), 1)
    for position, tokens in enumerate(prompts.T):
        _, state = model.decode(batch_of(list(tokens[:, None]), [position] * len(prompts)), state)
    return dict(enumerate(state[::2]))


@torch.no_grad()
def hf_decoded(model: Any, prompts: torch.Tensor) -> dict[int, torch.Tensor]:
    """The same by Hugging Face's layers, called one by one since its model wants an attention layer to count tokens."""
    cache = DynamicCache(config=model.config)
    for tokens in prompts.T:
        x = model.model.embed_tokens(tokens[:, None])
        for layer in model.model.layers:
            x = layer(x, position_embeddings=None, cache=cache)
    return {layer: cache.get_recurrent_state(layer) for layer in range(model.config.num_hidden_layers)}


@pytest.mark.slow
def test_state_after_many_steps() -> None:
    """Random tokens, and one token again and again. Both layers are gated delta nets: no positions needed."""
    model = first_layers("qwen3_5", 2)
    assert set(model.config.layer_types) == {"linear_attention"}
    random = torch.randint(0, model.config.vocab_size, (STEPS,), generator=torch.Generator().manual_seed(0))
    prompts = torch.stack([random, torch.full((STEPS,), 17)])
    ours, hf = decoded(port(model), prompts), hf_decoded(model, prompts)
    for row, kind in enumerate(("random tokens", "one token")):
        exact = TwinModel(model)(prompts[row]).recurrent
        for layer, state in exact.items():
            error, hf_error = relative(ours[layer][row], state), relative(hf[layer][row], state)
            print(f"{kind}, layer {layer}: ours {error:.1e}, Hugging Face {hf_error:.1e}")
            assert ours[layer].dtype == torch.float32
            assert error <= 3 * hf_error
            assert hf_error < 1e-4
