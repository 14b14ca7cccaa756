"""The measurement of true sizes at the fixtures' shapes, on the CPU: the models agree, and planted faults are seen."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.config_loader import load_config
from nxdi_qwen.modeling.presets import PRESETS
from tests.comparison import relative
from tests.hf_fixtures import hf_model, measured_decay, prompt_ids
from tests.true_sizes import measure_gpu
from tests.true_sizes.measure_gpu import measure
from tests.true_sizes.runs import our_side, step_by_step, texts, their_side
from tests.true_sizes.shared_model import Pair, build_pair, in_float32, sharing_report
from tests.true_sizes.verdicts import NEAR_TIE

LENGTHS, REPEATED, STEPS = (1, 65), 70, 4
FAMILIES = ("qwen3_5_tied", "qwen3_5_moe", "qwen3_next_mixed")


def pair_of(name: str, folder: Path, dtype: torch.dtype) -> Pair:
    hf_model(name).config.save_pretrained(folder)
    return build_pair(load_config(folder).config, dtype, "cpu")


def verdicts(pair: Pair) -> dict[str, Any]:
    return measure(pair, LENGTHS, REPEATED, STEPS)


def scale_ours(pair: Pair, name: str, factor: float) -> None:
    """One of our parameters, on memory of its own from now on."""
    assert pair.origins[name].shared
    owner, _, attribute = name.rpartition(".")
    parameter = nn.Parameter(pair.model.get_parameter(name) * factor, requires_grad=False)
    setattr(pair.model.get_submodule(owner), attribute, parameter)


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_agrees_and_one_scaled_tensor_does_not(name: str, tmp_path: Path) -> None:
    pair = pair_of(name, tmp_path, torch.float32)
    result = verdicts(pair)
    assert result["ok"], result
    assert all(row["own"]["rel"] < 1e-5 for row in result["float32"]["texts"])
    scale_ours(pair, "layers.2.linear_attn.out_proj.weight", 1.01)
    result = verdicts(pair)
    assert not any(row["ok"] for row in result["float32"]["texts"])


@pytest.mark.parametrize("name", FAMILIES[:2])
def test_bfloat16_agrees_and_one_scaled_tensor_does_not(name: str, tmp_path: Path) -> None:
    pair = pair_of(name, tmp_path, torch.bfloat16)
    result = verdicts(pair)
    assert result["float32"]["ok"], result
    errors = result["bfloat16"]["float32_experts" if pair.config.num_experts else "free"]
    # Too few tokens for the bound of 1.1 itself.
    assert all(0.8 < errors[part]["ratio"] < 1.25 for part in ("prefill", "decode")), errors
    scale_ours(pair, "layers.2.linear_attn.out_proj.weight", 1.05)
    result = verdicts(pair)
    assert not result["float32"]["ok"]
    assert not result["bfloat16"]["ok"]


def test_taking_their_experts_hides_no_fault_of_a_router(tmp_path: Path) -> None:
    pair = pair_of("qwen3_5_moe", tmp_path, torch.float32)

    def next_expert(_router: nn.Module, _inputs: object, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return (output[0] + 1) % pair.config.num_experts, output[1]

    our_side(pair, torch.float32).routers[2].register_forward_hook(next_expert)
    for row in verdicts(pair)["float32"]["texts"]:
        assert not row["ok"]
        assert row["ours"]["rel"] <= row["bound"]
        assert row["ours"]["flip_gap"] > NEAR_TIE


def test_what_is_shared_and_what_is_copied(tmp_path: Path) -> None:
    def kinds(name: str, dtype: torch.dtype) -> dict[str, Any]:
        return sharing_report(pair_of(name, tmp_path, dtype))

    for name in FAMILIES[:2]:
        report = kinds(name, torch.float32)
        assert not report["copied"]
        assert report["shared_bytes"] == report["reference_bytes"]
        kept = {f"layers.*.linear_attn.{part}.weight" for part in ("A_log", "dt_bias", "norm")}
        assert kinds(name, torch.bfloat16)["copied"].keys() == kept
    report = kinds("qwen3_next_mixed", torch.float32)
    assert report["copied"].keys() == {f"layers.*.linear_attn.{part}_proj.weight" for part in "qkvzba"}
    assert report["shared_bytes"] + report["copied_bytes"] == report["reference_bytes"]


def test_weights_have_slow_decay_and_every_layer_counts(tmp_path: Path) -> None:
    pair = pair_of("qwen3_5_moe", tmp_path, torch.float32)
    ids = prompt_ids(pair.reference, 65)
    decays = torch.stack(list(measured_decay(pair.reference, ids).values()))
    assert -0.05 < decays.mean() < 0
    side = their_side(pair)
    (text,) = texts(pair.config.vocab_size, (65,), None, 1)
    logits = side.run(text).logits
    for layer in pair.reference.model.layers:
        last = layer.mlp.shared_expert.down_proj.weight
        kept = last.data
        last.data = kept * 1.01
        assert relative(side.run(text).logits, logits) > 1e-4
        last.data = kept


def test_step_by_step_and_widening_leave_no_trace(tmp_path: Path) -> None:
    pair = pair_of("qwen3_5_tied", tmp_path, torch.bfloat16)
    side = their_side(pair)
    (text,) = texts(pair.config.vocab_size, (70,), None, 1)
    narrow = side.run(text).logits
    with in_float32(pair.reference, pair.reference.model.layers):
        wide = side.run(text).logits
        with step_by_step(pair):
            stepped = side.run(text).logits
        assert torch.equal(side.run(text).logits, wide)
    assert 0 < relative(stepped, wide) < 1e-5 < relative(narrow, wide)
    assert torch.equal(side.run(text).logits, narrow)


@pytest.mark.parametrize("json_wanted", [False, True])
def test_command_line(
    json_wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hf_model("qwen3_5_moe_tied").config.save_pretrained(tmp_path)
    monkeypatch.setitem(PRESETS, "tiny", load_config(tmp_path).config)
    monkeypatch.setattr(measure_gpu, "LENGTHS", LENGTHS)
    monkeypatch.setattr(measure_gpu, "REPEATED", REPEATED)
    monkeypatch.setattr(measure_gpu, "STEPS", STEPS)
    words = ["measure_gpu", "--preset", "tiny", "--dtype", "bfloat16", "--device", "cpu", "--layers"]
    monkeypatch.setattr(sys, "argv", [*words, "9"])
    assert measure_gpu.main() == 2
    assert capsys.readouterr().err == "error: --layers must be 3 to 5, got 9\n"

    monkeypatch.setattr(sys, "argv", [*words, "3", *(["--json"] if json_wanted else [])])
    status = measure_gpu.main()
    out = capsys.readouterr().out
    if json_wanted:
        result = json.loads(out)
        assert status == (0 if result["ok"] else 1)
        assert (result["layers"], result["layers_of_model"]) == (3, 5)
        assert {"versions", "peak_gib", "seconds", "sharing", "float32", "bfloat16"} <= result.keys()
    else:
        assert "tiny, 3 of 5 layers" in out and "float32: ok" in out and "float32_experts, decode: ratio" in out


def test_configurations_are_read_back(tmp_path: Path) -> None:
    """The configuration that Hugging Face's model gets from ours says the same as the fixture's own."""
    for name in FAMILIES:
        hf_model(name).config.save_pretrained(tmp_path / name)
        config: ModelConfig = load_config(tmp_path / name).config
        build_pair(config, torch.float32, "cpu").reference.config.save_pretrained(tmp_path / "again")
        again = load_config(tmp_path / "again").config
        assert {key: value for key, value in again.to_dict().items() if key != "eos_token_ids"} == {
            key: value for key, value in config.to_dict().items() if key != "eos_token_ids"
        }
