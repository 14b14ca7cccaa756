"""Presets: the table of the public models."""

import pytest

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.presets import PRESETS, preset

# Billions of parameters that the names promise: of the text model, and read per token where the name says so (-aNb).
PARAMETERS = {
    "qwen3.5-0.8b": (0.8, None),
    "qwen3.5-2b": (2, None),
    "qwen3.5-4b": (4, None),
    "qwen3.5-9b": (9, None),
    "qwen3.5-27b": (27, None),
    "qwen3.6-27b": (27, None),
    "qwen3.8-27b": (27, None),
    "qwen3.5-35b-a3b": (35, 3),
    "qwen3.6-35b-a3b": (35, 3),
    "qwen3.5-122b-a10b": (122, 10),
    "qwen3.5-397b-a17b": (397, 17),
    "qwen3-next-80b-a3b": (80, 3),
    "qwen3-coder-next": (80, 3),
}


def count(config: ModelConfig, experts: int) -> int:
    """Parameters of the text model with `experts` routed experts a layer; small vectors are left out."""
    hidden = config.hidden_size
    attention = hidden * config.head_dim * (3 * config.num_attention_heads + 2 * config.num_key_value_heads)
    gdn = hidden * (2 * config.key_dim + 3 * config.value_dim + 2 * config.linear_num_value_heads)
    total = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    for layer_type, is_moe in zip(config.layer_types, config.moe_layers, strict=True):
        total += attention if layer_type == "full_attention" else gdn
        if is_moe:
            total += hidden * config.num_experts + 3 * hidden * config.shared_expert_intermediate_size
            total += 3 * hidden * config.moe_intermediate_size * experts
        else:
            total += 3 * hidden * config.intermediate_size
    return total


def test_every_public_size_has_a_preset():
    assert set(PRESETS) == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_are_those_of_the_names(name):
    config = preset(name)
    total, active = PARAMETERS[name]
    assert count(config, config.num_experts) / 1e9 == pytest.approx(total, rel=0.1)
    if active is not None:
        # What the names call active leaves the embedding out, or not, and is rounded freely.
        assert count(config, config.num_experts_per_tok) / 1e9 == pytest.approx(active, rel=0.35)


@pytest.mark.parametrize("name", PARAMETERS)
def test_facts_that_all_sizes_share(name):
    config = preset(name)
    assert config.head_dim == 256 and config.rotary_dim == 64 and config.linear_num_key_heads == 16
    assert config.layer_types[:4] == ("linear_attention",) * 3 + ("full_attention",)
    assert config.max_position_embeddings == 262144 and config.dtype == "bfloat16"
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_facts_that_differ():
    assert preset("qwen3-coder-next").rope.theta == 5e6
    assert preset("qwen3-next-80b-a3b").rope.theta == 1e7
    assert preset("qwen3-next-80b-a3b").rope.mrope_section is None
    assert preset("qwen3.8-27b").rope.mrope_section == (11, 11, 10)
    assert preset("qwen3-next-80b-a3b").eos_token_ids == (151645,)
    assert preset("qwen3.5-9b").eos_token_ids == (248044,)
    assert set(preset("qwen3.6-27b").eos_token_ids) == {248046, 248044}
    assert [name for name in PRESETS if preset(name).tie_word_embeddings] == [
        "qwen3.5-0.8b",
        "qwen3.5-2b",
        "qwen3.5-4b",
    ]


def test_an_unknown_name_is_an_error_that_lists_the_names():
    with pytest.raises(InputError, match=r"no preset 'Qwen3\.5-9B'; there are qwen3\.5-0\.8b, .*qwen3-coder-next"):
        preset("Qwen3.5-9B")
