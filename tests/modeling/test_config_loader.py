"""load_config: model types, nesting, tokens, what is refused, what is reported, and bad folders."""

import json
from functools import partial

import pytest
from transformers import (
    GenerationConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from nxdi_qwen.modeling.config_loader import load_config
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.generation_defaults import GenerationDefaults
from tests.modeling.config_samples import (
    DENSE,
    EXPERTS,
    FULL,
    LINEAR,
    MOE,
    NEXT,
    ROPE,
    SIZES,
    nested,
    without,
    write_and_load,
)


@pytest.fixture
def load(tmp_path):
    """load_config of a folder that holds these objects."""
    return partial(write_and_load, tmp_path)


# --- files that Hugging Face's own classes save ---


HF_SIZES = without(SIZES, "dtype")


@pytest.mark.parametrize(
    "family, text_class, outer_class",
    [
        ("qwen3_next", Qwen3NextConfig, None),
        ("qwen3_5", Qwen3_5TextConfig, None),
        ("qwen3_5", Qwen3_5TextConfig, Qwen3_5Config),
        ("qwen3_5_moe", Qwen3_5MoeTextConfig, None),
        ("qwen3_5_moe", Qwen3_5MoeTextConfig, Qwen3_5MoeConfig),
    ],
)
def test_files_saved_by_hugging_face(tmp_path, family, text_class, outer_class):
    dense, moe = {"intermediate_size": 96}, EXPERTS
    sizes = HF_SIZES | {"qwen3_next": dense | moe, "qwen3_5": dense, "qwen3_5_moe": moe}[family]
    types = [LINEAR, FULL, FULL, LINEAR]
    hf_text = text_class(**sizes, layer_types=types, rope_parameters=dict(ROPE), eos_token_id=[7, 9], dtype="bfloat16")
    hf_config = hf_text if outer_class is None else outer_class(text_config=hf_text.to_dict())
    hf_config.save_pretrained(tmp_path)

    loaded = load_config(tmp_path)
    config = loaded.config
    assert config.family == family
    for key in sizes:
        if key not in ("hidden_act", "intermediate_size"):
            assert getattr(config, key) == getattr(hf_text, key), key
    assert config.intermediate_size == (96 if family == "qwen3_5" else None)
    assert config.layer_types == tuple(types)
    assert config.moe_layers == (family != "qwen3_5",) * 4
    assert config.rope.theta == 1e7 and config.rope.partial_rotary_factor == 0.25
    assert config.rope.mrope_section == (None if family == "qwen3_next" else (2, 1, 1))
    assert config.dtype == "bfloat16" and config.eos_token_ids == (7, 9)
    assert not config.tie_word_embeddings and not config.attention_bias and config.pad_token_id is None
    ignored_rope = ["ignored rope keys: mrope_interleaved, mrope_section"] if family == "qwen3_next" else []
    ignored = ["ignored configuration keys: router_aux_loss_coef"] if family != "qwen3_5" else []
    assert list(loaded.notes) == ignored_rope + ignored
    assert loaded.generation == GenerationDefaults() and loaded.quantization is None


def test_a_generation_config_saved_by_hugging_face(tmp_path, load):
    GenerationConfig(do_sample=True, temperature=0.6, top_k=20, top_p=0.95, eos_token_id=[5, 7]).save_pretrained(
        tmp_path
    )
    loaded = load(DENSE | {"eos_token_id": 7})
    assert loaded.generation == GenerationDefaults(do_sample=True, temperature=0.6, top_k=20, top_p=0.95)
    assert loaded.config.eos_token_ids == (7, 5) and loaded.notes == ()


# --- model types, nesting ---


@pytest.mark.parametrize(
    "config, family",
    [
        (NEXT, "qwen3_next"),
        (DENSE, "qwen3_5"),
        (DENSE | {"model_type": "qwen3_5"}, "qwen3_5"),
        (MOE, "qwen3_5_moe"),
        (MOE | {"model_type": "qwen3_5_moe"}, "qwen3_5_moe"),
        (nested(DENSE), "qwen3_5"),
        (nested(MOE), "qwen3_5_moe"),
        (nested(NEXT), "qwen3_next"),
        (nested(DENSE) | {"text_config": without(DENSE, "model_type")}, "qwen3_5"),
        (without(nested(DENSE), "model_type"), "qwen3_5"),
    ],
)
def test_model_types_flat_and_nested(load, config, family):
    loaded = load(config | {"architectures": ["LlamaForCausalLM"]})
    assert loaded.config.family == family and loaded.config.hidden_size == 64 and loaded.notes == ()


@pytest.mark.parametrize("model_type", ["qwen4_exp", "llama", "qwen3_5_vision", 5])
@pytest.mark.parametrize("is_nested", [False, True])
def test_other_model_types_are_refused_with_the_accepted_ones(load, model_type, is_nested):
    config = nested(DENSE, model_type=model_type) if is_nested else DENSE | {"model_type": model_type}
    accepted = "qwen3_next, qwen3_5, qwen3_5_text, qwen3_5_moe, qwen3_5_moe_text"
    with pytest.raises(
        InputError, match=f"config.json: model_type {model_type!r} is not supported; accepted are {accepted}"
    ):
        load(config)


def test_contradicting_model_types_are_refused(load):
    with pytest.raises(InputError, match=r"model_type qwen3_5 contradicts text_config\.model_type qwen3_5_moe_text"):
        load(nested(MOE, model_type="qwen3_5"))


def test_without_a_model_type(load):
    with pytest.raises(InputError, match="model_type is missing"):
        load(without(DENSE, "model_type"))


# --- dtype, tied head, tokens ---


@pytest.mark.parametrize(
    "inner, outer, dtype, notes",
    [
        ({"dtype": "bfloat16"}, {}, "bfloat16", 0),
        ({}, {"dtype": "float16"}, "float16", 0),
        ({}, {"torch_dtype": "float32"}, "float32", 0),
        ({"torch_dtype": "torch.bfloat16"}, {"dtype": "bfloat16"}, "bfloat16", 0),
        ({"dtype": "bfloat16"}, {"dtype": "float32"}, "bfloat16", 1),
        ({"dtype": None}, {}, "bfloat16", 1),
    ],
)
def test_dtype_spellings(load, inner, outer, dtype, notes):
    loaded = load(nested(without(DENSE, "dtype") | inner, **outer))
    assert loaded.config.dtype == dtype and len(loaded.notes) == notes
    assert all("dtype" in note for note in loaded.notes)


def test_flat_torch_dtype(load):
    assert load(without(NEXT, "dtype") | {"torch_dtype": "bfloat16"}).config.dtype == "bfloat16"


@pytest.mark.parametrize("inner", [None, False, True])
@pytest.mark.parametrize("outer", [None, False, True])
def test_tie_flags(load, inner, outer):
    loaded = load(nested(DENSE | {"tie_word_embeddings": inner}, tie_word_embeddings=outer))
    assert loaded.config.tie_word_embeddings is bool(inner or outer)
    assert len(loaded.notes) == ({inner, outer} == {False, True})


@pytest.mark.parametrize(
    "inner, outer, generated, eos",
    [
        (248044, None, None, (248044,)),
        (248044, None, [248046, 248044], (248044, 248046)),
        (None, [3, 4], 5, (3, 4, 5)),
        ([1], 2, [3, 1], (1, 2, 3)),
        (None, None, None, ()),
    ],
)
def test_end_tokens_are_a_union(load, inner, outer, generated, eos):
    loaded = load(nested(DENSE | {"eos_token_id": inner}, eos_token_id=outer), {"eos_token_id": generated})
    assert loaded.config.eos_token_ids == eos


def test_pad_and_bos(load):
    assert load(DENSE | {"pad_token_id": None}).config.pad_token_id is None
    loaded = load(nested(DENSE | {"pad_token_id": 0}, bos_token_id=2), {"pad_token_id": 9, "bos_token_id": 9})
    assert (loaded.config.pad_token_id, loaded.config.bos_token_id) == (0, 2)
    assert load(NEXT, {"pad_token_id": 9}).config.pad_token_id == 9


# --- what would be another model, and what is only unknown ---


@pytest.mark.parametrize(
    "key, value",
    [
        ("output_gate_type", "sigmoid"),
        ("attn_output_gate", False),
        ("attn_output_gate", 1),
        ("use_sliding_window", True),
        ("mtp_use_dedicated_embeddings", True),
        ("hidden_act", "gelu"),
    ],
)
@pytest.mark.parametrize("place", ["flat", "inner", "outer"])
def test_other_models_are_refused_by_the_key(load, key, value, place):
    config = {
        "flat": DENSE | {key: value},
        "inner": nested(DENSE | {key: value}),
        "outer": nested(DENSE, **{key: value}),
    }
    with pytest.raises(InputError, match=f"config.json: {key} {value!r} is another model"):
        load(config[place])


@pytest.mark.parametrize(
    "key, value",
    [
        ("output_gate_type", "silu"),
        ("output_gate_type", "swish"),
        ("output_gate_type", None),
        ("attn_output_gate", True),
        ("use_sliding_window", False),
        ("mtp_use_dedicated_embeddings", False),
        ("mtp_num_hidden_layers", 1),
        ("sliding_window", None),
        ("attention_dropout", 0.0),
        ("initializer_range", 0.02),
        ("use_cache", True),
        ("transformers_version", "4.57.0.dev0"),
        ("image_token_id", 248056),
    ],
)
def test_harmless_keys_are_silent(load, key, value):
    assert load(nested(DENSE | {key: value}, **{key: value})).notes == ()


def test_unknown_keys_are_reported(load):
    outer = {
        "language_model_only": False,
        "router_aux_loss_coef": 0.1,
        "hidden_size": 3,
        "rope_scaling": {"type": "yarn"},
    }
    loaded = load(nested(MOE | {"mamba_ssm_dtype": "float32", "router_aux_loss_coef": 0.001}, **outer))
    ignored = "hidden_size, language_model_only, mamba_ssm_dtype, rope_scaling, router_aux_loss_coef"
    assert loaded.notes == (f"ignored configuration keys: {ignored}",)
    assert loaded.config.hidden_size == 64 and loaded.config.rope.rope_type == "default"


def test_attention_bias(load):
    assert load(DENSE | {"attention_bias": True}).config.attention_bias is True
    with pytest.raises(InputError, match="attention_bias must be true or false, got 'no'"):
        load(DENSE | {"attention_bias": "no"})


def test_quantization_is_passed_through(load):
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "modules_to_not_convert": None}
    assert load(nested(DENSE, quantization_config=fp8)).quantization == fp8
    assert load(nested(DENSE | {"quantization_config": fp8})).quantization == fp8
    assert load(DENSE | {"quantization": {"bits": 4, "group_size": 64}}).quantization == {"bits": 4, "group_size": 64}
    with pytest.raises(InputError, match="quantization_config must be an object"):
        load(DENSE | {"quantization_config": "fp8"})


# --- folders and files ---


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "content, message",
    [
        (b'{\n "a": 1,\n oops}', r"is not valid JSON \(.* at line 3, column 2\)"),
        (b"", "is not valid JSON"),
        (b"[1]", "must hold a JSON object, got"),
        (b'{"a": "\xff"}', "is not a configuration file"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not a configuration file"),
    ],
)
def test_malformed_files(tmp_path, name, content, message):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=rf"[/\\]{name} {message}") as caught:
        load_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_hub_id_gets_the_download_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"hf download Qwen/Qwen3\.5-0\.8B --local-dir Qwen3\.5-0\.8B$"):
        load_config("Qwen/Qwen3.5-0.8B")


@pytest.mark.parametrize("name", ["absent", "./absent/deep", "here/absent", "/absent/deep"])
def test_an_absent_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(InputError, match=r"no folder .*absent.*; give the folder") as caught:
        load_config(name)
    assert "hf download" not in str(caught.value)


def test_a_folder_without_config_and_a_file(tmp_path):
    with pytest.raises(InputError, match=r"no config\.json in"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"config\.json is a file; give the folder"):
        load_config(tmp_path / "config.json")
