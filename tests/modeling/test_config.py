"""ModelConfig: what it refuses, and its journey through JSON."""

import dataclasses
import json

import pytest

from nxdi_qwen.modeling.config import ModelConfig, RopeConfig
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.presets import preset

DENSE, MOE, NEXT = preset("qwen3.5-27b"), preset("qwen3.5-35b-a3b"), preset("qwen3-next-80b-a3b")
YARN = RopeConfig(1e7, 0.25, "yarn", (11, 11, 10), 4.0, 262144, 32.0, 1.0, 1.1, 0.7, 0.9, False)


def changed(config, **values):
    return dataclasses.replace(config, **values)


@pytest.mark.parametrize("config", [DENSE, MOE, NEXT, changed(NEXT, rope=YARN, pad_token_id=3, eos_token_ids=())])
def test_from_dict_is_the_inverse_of_to_dict_also_through_json(config):
    assert ModelConfig.from_dict(config.to_dict()) == config
    again = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config and hash(again) == hash(config)


def test_widths_are_derived():
    assert (DENSE.rotary_dim, DENSE.key_dim, DENSE.value_dim, DENSE.conv_dim) == (64, 2048, 6144, 10240)


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda d: d.pop("hidden_size"), "lacks hidden_size"),
        (lambda d: d.update(speed=1), "unknown keys: speed"),
        (lambda d: d["rope"].pop("theta"), "rope lacks theta"),
        (lambda d: d["rope"].update(base=1), "rope has unknown keys: base"),
        (lambda d: d.update(rope=None), "rope must be an object, got None"),
        (lambda d: d.update(hidden_size="2048"), "hidden_size must be an integer of at least 1, got '2048'"),
        (lambda d: d.update(layer_types="linear_attention"), "layer_types must be a list"),
        (lambda d: d["rope"].update(mrope_section=11), "mrope_section must hold three integers"),
    ],
)
def test_from_dict_is_strict(edit, message):
    values = json.loads(json.dumps(MOE.to_dict()))
    edit(values)
    with pytest.raises(InputError, match=message):
        ModelConfig.from_dict(values)


def test_from_dict_of_something_else_is_an_error():
    with pytest.raises(InputError, match="must be an object"):
        ModelConfig.from_dict([1, 2])


SIZES = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "max_position_embeddings",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
]


@pytest.mark.parametrize("value", [0, -1, True, 4.0, "4", None, [4]], ids=repr)
@pytest.mark.parametrize("key", SIZES)
def test_sizes_are_positive_integers(key, value):
    with pytest.raises(InputError, match=f"^{key} must be an integer of at least"):
        changed(MOE, **{key: value})


@pytest.mark.parametrize("value", [0, True, 4.0, None], ids=repr)
def test_dense_layers_need_an_intermediate_size(value):
    with pytest.raises(InputError, match="intermediate_size must be an integer"):
        changed(DENSE, intermediate_size=value)


@pytest.mark.parametrize(
    "config, values, message",
    [
        (DENSE, {"family": "qwen4_exp"}, "family must be one of qwen3_next, qwen3_5, qwen3_5_moe, got 'qwen4_exp'"),
        (DENSE, {"dtype": "float8_e4m3fn"}, "dtype must be one of bfloat16, float16, float32, got 'float8_e4m3fn'"),
        (DENSE, {"dtype": None}, "dtype must be one of"),
        (
            DENSE,
            {"num_key_value_heads": 5},
            "num_attention_heads must be a multiple of num_key_value_heads, got 24 and 5",
        ),
        (DENSE, {"linear_num_key_heads": 32}, "linear_num_value_heads must be a multiple of .*, got 48 and 32"),
        (DENSE, {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be an integer of at least 2, got 1"),
        (DENSE, {"rms_norm_eps": 0.0}, "rms_norm_eps must be a finite number greater than 0, got 0.0"),
        (DENSE, {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        (DENSE, {"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a finite number"),
        (DENSE, {"attention_bias": 1}, "attention_bias must be true or false, got 1"),
        (DENSE, {"tie_word_embeddings": None}, "tie_word_embeddings must be true or false"),
        (DENSE, {"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false"),
        (DENSE, {"head_dim": 252}, "must be an even number of rotated dimensions, got 63"),
        (DENSE, {"head_dim": 128}, "mrope_section .* must sum to 16, half of head_dim 128"),
        (DENSE, {"rope": None}, "rope must be an object"),
        (DENSE, {"num_hidden_layers": 63}, "layer_types must have one entry per layer: 64 .*num_hidden_layers is 63"),
        (DENSE, {"moe_layers": (False,)}, "moe_layers must have one entry per layer: 1 entries"),
        (DENSE, {"layer_types": ("linear_attention", "sliding_attention") * 32}, r"layer_types\[1\] must be one of"),
        (DENSE, {"moe_layers": (0,) * 64}, r"moe_layers\[0\] must be true or false"),
        (DENSE, {"moe_layers": (True,) * 64}, "must be false for every layer of a qwen3_5 model"),
        (MOE, {"moe_layers": (False,) * 40}, "must be true for every layer of a qwen3_5_moe model"),
        (MOE, {"num_experts_per_tok": 257}, "num_experts_per_tok must be at most num_experts, got 257 of 256"),
        (DENSE, {"eos_token_ids": 7}, "eos_token_id must be an integer or a list"),
        (DENSE, {"eos_token_ids": (7, -1)}, "eos_token_id must be an integer of at least 0, got -1"),
        (DENSE, {"pad_token_id": 1.5}, "pad_token_id must be an integer"),
        (DENSE, {"bos_token_id": True}, "bos_token_id must be an integer"),
    ],
)
def test_impossible_models_are_refused(config, values, message):
    with pytest.raises(InputError, match=message):
        changed(config, **values)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"theta": 1}, "rope_theta must be a finite number greater than 1, got 1"),
        ({"theta": "1e7"}, "rope_theta must be"),
        ({"theta": float("inf")}, "rope_theta must be a finite number"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor must be a finite number greater than 0"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must be at most 1, got 1.5"),
        ({"rope_type": "longrope"}, "rope_type must be one of default, yarn, got 'longrope'"),
        ({"truncate": 1}, "truncate must be true or false"),
        ({"mrope_section": (16, 16)}, "mrope_section must hold three integers"),
        ({"mrope_section": (11, 11, -1)}, "each entry of mrope_section must be an integer of at least 0, got -1"),
        ({"factor": 0.5}, "factor must be a finite number of at least 1, got 0.5"),
        ({"factor": None}, "factor must be a finite number"),
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings must be an integer"),
        ({"beta_fast": 0}, "beta_fast must be a finite number greater than 0"),
        ({"beta_slow": "1"}, "beta_slow must be"),
        ({"attention_factor": -1.0}, "attention_factor must be"),
        ({"mscale": -1}, "mscale must be a finite number of at least 0"),
        ({"mscale_all_dim": True}, "mscale_all_dim must be"),
        ({"rope_type": "default"}, "factor belongs to rope_type yarn"),
    ],
)
def test_impossible_rotary_settings_are_refused(values, message):
    with pytest.raises(InputError, match=message):
        changed(YARN, **values)


def test_errors_stay_on_one_short_line():
    with pytest.raises(InputError) as caught:
        changed(DENSE, hidden_size="x\ny" * 1000)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200
