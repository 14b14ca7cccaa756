"""The fixtures can show a fault, the float64 twin is right, and the checkpoints are what Hugging Face reads."""

from __future__ import annotations

import copy
import functools
import json

import pytest
import torch
import transformers
from safetensors import safe_open
from tokenizers import Tokenizer

from tests.byte_tokenizer import IM_END_ID, PAD_ID
from tests.comparison import relative
from tests.hf_fixtures import (
    FIXTURES,
    hf_model,
    measured_decay,
    prompt_ids,
    reference_logits,
    reference_steps,
    save_checkpoint,
)
from tests.twin import TwinModel, TwinOutput, gated_delta_recurrence

NAMES = list(FIXTURES)
# (fixture, stacked experts): Hugging Face reads Qwen3-Next expert by expert only.
NESTED = [
    (name, stacked)
    for name in NAMES
    for stacked in (False, True)
    if FIXTURES[name].family == "qwen3_5_moe" or (FIXTURES[name].family == "qwen3_5" and not stacked)
]
FLAT = [(name, False) for name in NAMES if FIXTURES[name].family == "qwen3_next"] + NESTED


@functools.cache
def twin_output(name: str, length: int) -> TwinOutput:
    return TwinModel(hf_model(name))(prompt_ids(hf_model(name), length))


def test_recurrence_by_hand() -> None:
    """One head, dk = dv = 1, so that every number can be followed: S = 0.5 * 2 = 1, then 1 + 1 * 0.5 * (3 - 1) = 2."""
    one = torch.ones(1, 1, 1)
    output, state = gated_delta_recurrence(
        4 * one, one, 3 * one, torch.full((1, 1), 0.5).log(), torch.full((1, 1), 0.5), 2 * one
    )
    assert output.dtype == torch.float64
    torch.testing.assert_close((output.item(), state.item()), (8.0, 2.0), rtol=1e-7, atol=0)


def test_recurrence_is_continued_by_its_state() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, heads, dk, dv = 7, 3, 4, 5
    q, k, v = (torch.randn(tokens, heads, d, generator=generator) for d in (dk, dk, dv))
    g, beta = -torch.rand(tokens, heads, generator=generator), torch.rand(tokens, heads, generator=generator)
    whole, last = gated_delta_recurrence(q, k, v, g, beta)
    first, state = gated_delta_recurrence(q[:3], k[:3], v[:3], g[:3], beta[:3])
    rest, final = gated_delta_recurrence(q[3:], k[3:], v[3:], g[3:], beta[3:], state)
    assert torch.equal(torch.cat((first, rest)), whole)
    assert torch.equal(final, last)


@pytest.mark.parametrize("length", [1, 5, 65, 130])
@pytest.mark.parametrize("name", NAMES)
def test_twin_agrees_with_hugging_face(name: str, length: int) -> None:
    model = hf_model(name)
    reference = reference_logits(model, prompt_ids(model, length))
    twin = twin_output(name, length).logits
    assert twin.dtype == torch.float64
    # Also the conditioning of the fixture: two float32 implementations must have room below 1e-5 for each other.
    assert relative(reference, twin) < 5e-6


@pytest.mark.parametrize("name", NAMES)
def test_prefill_and_decode_agree_with_the_twin(name: str) -> None:
    model = hf_model(name)
    ids = prompt_ids(model, 65)
    twin = twin_output(name, 65)
    steps = reference_steps(model, ids[:57], ids[57:])
    assert relative(steps.logits, twin.logits[56:]) < 1e-5
    assert relative(steps.logits, reference_logits(model, ids)[56:]) < 1e-5
    assert steps.recurrent.keys() == twin.recurrent.keys() == steps.conv.keys() == twin.conv.keys()
    for layer, state in twin.recurrent.items():
        assert relative(steps.recurrent[layer], state) < 1e-5
        assert relative(steps.conv[layer][:, 1:], twin.conv[layer]) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_decay_is_slow_and_differs(name: str) -> None:
    model = hf_model(name)
    decays = measured_decay(model, prompt_ids(model, 130))
    assert len(decays) == model.config.layer_types.count("linear_attention")
    assert -torch.cat([g.flatten() for g in decays.values()]).mean() < 0.05
    for g in decays.values():
        assert g.shape == (130, model.config.linear_num_value_heads)
        assert g.max() < 0
        assert g.mean(0).std() > 0.1 * g.mean().abs()  # over heads
        assert (g.std(0) > 0.1 * g.mean(0).abs()).all()  # over tokens, in every head


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_matters(name: str) -> None:
    """5 % noise on any one tensor (noise: a common factor would vanish in the norms) moves the logits visibly."""
    model = copy.deepcopy(hf_model(name))
    ids = prompt_ids(model, 65)
    reference = reference_logits(model, ids)
    generator = torch.Generator().manual_seed(0)
    for parameter_name, parameter in model.named_parameters():
        kept = parameter.data.clone()
        parameter.data.mul_(1 + 0.05 * torch.randn(kept.shape, generator=generator))
        assert relative(reference_logits(model, ids), reference) > 1e-4, parameter_name
        parameter.data.copy_(kept)


@pytest.mark.parametrize("name", [name for name in NAMES if FIXTURES[name].moe])
def test_every_expert_is_chosen(name: str) -> None:
    model = hf_model(name)
    chosen: list[set[int]] = []
    handles = [
        layer.mlp.gate.register_forward_hook(lambda _m, _i, output: chosen.append(set(output[2].flatten().tolist())))
        for layer in model.model.layers
        if hasattr(layer.mlp, "gate")
    ]
    reference_logits(model, prompt_ids(model, 65))
    for handle in handles:
        handle.remove()
    assert chosen
    assert all(experts == set(range(model.config.num_experts)) for experts in chosen)


def test_shapes_hide_nothing() -> None:
    configs = [hf_model(name).config for name in NAMES]
    for c in configs:
        assert c.linear_num_key_heads >= 2
        assert c.num_key_value_heads >= 2
        assert c.num_attention_heads // c.num_key_value_heads >= 2
    assert {c.linear_num_value_heads // c.linear_num_key_heads for c in configs} == {2, 3}
    assert {c.linear_conv_kernel_dim for c in configs} == {3, 4, 5}
    assert {c.tie_word_embeddings for c in configs} == {True, False}
    assert {32, 256} == {c.head_dim for c in configs}
    assert {c.linear_key_head_dim == c.linear_value_head_dim for c in configs} == {True, False}
    mixed = hf_model("qwen3_next_mixed").model.layers
    assert [hasattr(layer.mlp, "experts") for layer in mixed] == [False, True, False, False, False, True]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("name", "stacked"), FLAT)
def test_hugging_face_reads_what_is_saved(name: str, stacked: bool, shards: int, tmp_path) -> None:
    model = hf_model(name)
    save_checkpoint(model, tmp_path, stacked=stacked, shards=shards)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()
    for parameter_name, parameter in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[parameter_name], parameter), parameter_name


@pytest.mark.parametrize(("name", "stacked"), NESTED)
def test_nested_checkpoint(name: str, stacked: bool, tmp_path) -> None:
    model = hf_model(name)
    save_checkpoint(model, tmp_path, nested=True, stacked=stacked)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == FIXTURES[name].family
    assert {"text_config", "vision_config"} <= config.keys()
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.language_model.norm.weight" in names
    assert any(tensor.startswith("model.visual.") for tensor in names)
    assert ("lm_head.weight" in names) != model.config.tie_word_embeddings
    assert any(".experts.gate_up_proj" in tensor for tensor in names) == stacked
    nested = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ids = prompt_ids(model, 65)
    assert relative(reference_logits(nested, ids), reference_logits(model, ids)) < 1e-6
    assert relative(TwinModel(nested)(ids).logits, twin_output(name, 65).logits) < 1e-12


def test_tokenizer(tmp_path) -> None:
    model = hf_model("qwen3_5")
    save_checkpoint(model, tmp_path, tokenizer=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("é!", add_special_tokens=False) == list("é!".encode())
    every_byte = "".join(map(chr, range(256)))
    assert tokenizer.decode(tokenizer.encode(every_byte)) == every_byte
    assert len(Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab()) <= model.config.vocab_size
    assert tokenizer.eos_token_id == IM_END_ID
    message = [{"role": "user", "content": "hi"}]
    options = {"tokenize": False, "add_generation_prompt": True}
    head = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert tokenizer.apply_chat_template(message, **options) == head
    assert tokenizer.apply_chat_template(message, enable_thinking=False, **options) == head + "\n</think>\n\n"
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [IM_END_ID, PAD_ID]
