"""Layer kinds and sizes in config.json: attention or GDN, dense or MoE, absent and mistyped sizes."""

from functools import partial

import pytest
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextSparseMoeBlock

from nxdi_qwen.modeling.errors import InputError
from tests.modeling.config_samples import (
    DENSE,
    EXPERTS,
    FULL,
    LINEAR,
    MOE,
    NEXT,
    SIZES,
    nested,
    without,
    write_and_load,
)

HF_SIZES = without(SIZES, "dtype")


@pytest.fixture
def load(tmp_path):
    """load_config of a folder that holds these objects."""
    return partial(write_and_load, tmp_path)


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({}, (LINEAR, LINEAR, LINEAR, FULL)),
        ({"full_attention_interval": 2}, (LINEAR, FULL, LINEAR, FULL)),
        ({"layer_types": None, "full_attention_interval": 1}, (FULL,) * 4),
        ({"layer_types": [FULL, LINEAR, LINEAR, LINEAR]}, (FULL, LINEAR, LINEAR, LINEAR)),
        ({"layer_types": [LINEAR, FULL] * 2, "full_attention_interval": 2}, (LINEAR, FULL) * 2),
    ],
)
def test_layer_types(load, keys, expected):
    loaded = load(DENSE | keys)
    assert loaded.config.layer_types == expected and loaded.notes == ()


def test_layer_types_win_over_the_interval(load):
    loaded = load(DENSE | {"layer_types": [FULL, LINEAR] * 2, "full_attention_interval": 4})
    assert loaded.config.layer_types == (FULL, LINEAR) * 2
    assert loaded.notes == ("layer_types win over the contradicting full_attention_interval 4",)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"layer_types": [LINEAR] * 3}, "layer_types has 3 entries, but num_hidden_layers is 4"),
        ({"layer_types": [LINEAR] * 3 + ["attention"]}, r"layer_types\[3\] must be one of .* got 'attention'"),
        ({"layer_types": [LINEAR] * 3 + [None]}, r"layer_types\[3\] must be one of"),
        ({"layer_types": LINEAR}, "layer_types must be a list"),
        ({"full_attention_interval": 0}, "full_attention_interval must be an integer of at least 1, got 0"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers must be an integer"),
    ],
)
def test_bad_layers(load, keys, message):
    with pytest.raises(InputError, match=message):
        load(DENSE | keys)


@pytest.mark.parametrize(
    "keys, moe_layers",
    [
        ({}, (True, True, True, True)),
        ({"mlp_only_layers": []}, (True, True, True, True)),
        ({"mlp_only_layers": [0, 2]}, (False, True, False, True)),
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, (False,) * 4),
        ({"num_experts": 0}, (False,) * 4),
    ],
)
def test_dense_and_moe_layers_of_qwen3_next_are_those_of_hugging_face(load, keys, moe_layers):
    config = load(NEXT | keys).config
    assert config.moe_layers == moe_layers
    assert config.intermediate_size == (None if all(moe_layers) else 96)
    assert config.num_experts == (8 if any(moe_layers) else 0)
    hf_config = Qwen3NextConfig(**HF_SIZES, **(EXPERTS | {"intermediate_size": 96} | keys))
    hf_config._experts_implementation = "eager"
    for index in range(4):
        layer = Qwen3NextDecoderLayer(hf_config, index)
        assert isinstance(layer.mlp, Qwen3NextSparseMoeBlock) is moe_layers[index]


def test_qwen3_5_moe_ignores_the_keys_of_qwen3_next(load):
    loaded = load(MOE | {"mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True})
    assert loaded.config.moe_layers == (True,) * 4 and loaded.notes == ()
    loaded = load(MOE | {"mlp_only_layers": [0], "decoder_sparse_step": 2, "norm_topk_prob": False})
    assert loaded.config.moe_layers == (True,) * 4 and loaded.config.norm_topk_prob is True
    assert loaded.notes == ("ignored configuration keys: decoder_sparse_step, mlp_only_layers, norm_topk_prob",)


@pytest.mark.parametrize("value", [True, False])
def test_qwen3_next_honours_norm_topk_prob(load, value):
    assert load(NEXT | {"norm_topk_prob": value}).config.norm_topk_prob is value


@pytest.mark.parametrize(
    "config, key",
    [(config, key) for config in (NEXT, MOE) for key in EXPERTS]
    + [(DENSE, "intermediate_size"), (NEXT | {"mlp_only_layers": [1]}, "intermediate_size")]
    + [(DENSE, key) for key in without(SIZES, "hidden_act", "dtype")],
)
@pytest.mark.parametrize("state", ["missing", "null"])
def test_absent_sizes_are_named(load, config, key, state):
    config = without(config, key) if state == "missing" else config | {key: None}
    with pytest.raises(InputError, match=f"config.json: {key} is {state}; add it"):
        load(config)


@pytest.mark.parametrize("key", without(SIZES, "hidden_act", "dtype"))
@pytest.mark.parametrize("value", ["abc", True, [1], {}, -3], ids=repr)
def test_mistyped_sizes_are_named(load, key, value):
    with pytest.raises(InputError, match=f"config.json: {key} must be .*, got"):
        load(nested(DENSE | {key: value}))
