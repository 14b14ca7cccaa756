"""logit-diff: passes a right port, fails a wrong one with status 1, refuses bad input with status 2."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nxdi_qwen.modeling.model import HybridCausalLM
from nxdi_qwen.scripts.logit_diff import DECODE_STEPS, logit_diff
from tests.artifacts import MAX_LENGTH, artifact_of, checkpoint_of
from tests.command_line import call, refused
from tests.hf_fixtures import FIXTURES, Spec, model_of, save_checkpoint

NAME = "qwen3_5"
IDS = [5, 6, 7, 8, 5, 6]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of(tmp_path_factory, NAME)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifact_of(tmp_path_factory, NAME)


@pytest.fixture
def prompts(tmp_path: Path) -> Callable[..., Path]:
    """Writes lines into a prompts file."""

    def write(*lines: object) -> Path:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write


def test_artifact_with_the_built_in_prompts(
    checkpoint: Path, artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = call(capsys, logit_diff, "--model", checkpoint, "--artifacts", artifact)
    assert output.status == 0
    assert "130 random" in output.out and "passed: max_rel" in output.out


def test_json_has_every_position(
    checkpoint: Path, artifact: Path, prompts: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = prompts({"text": "héllo"}, "", {"ids": IDS})
    for target in ([], ["--artifacts", artifact]):
        output = call(
            capsys, logit_diff, "--model", checkpoint, *target, "--prompts", file, "--json", "--tolerance", 1e-5
        )
        report = json.loads(output.out)
        assert output.status == 0 and report["passed"] and report["argmax_match"] == 1
        assert report["reference"] == "transformers 5.24.0, float32"
        lengths = {(row["prompt"], row["phase"]): len(row["positions_rel"]) for row in report["differences"]}
        assert lengths == {
            ("line 1", "prefill"): 6,
            ("line 1", "decode"): DECODE_STEPS,
            ("line 3", "prefill"): 6,
            ("line 3", "decode"): DECODE_STEPS,
        }
        assert report["max_rel"] == max(row["max_rel"] for row in report["differences"]) <= 1e-5


@pytest.mark.parametrize("broken", ["weight", "nan"])
def test_a_wrong_port_fails_with_status_1(
    checkpoint: Path,
    prompts: Callable[..., Path],
    broken: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One weight 1 % off leaves most tokens as they are; only the logits show it. NaN must never count as small."""
    prefill = HybridCausalLM.prefill

    def wrong(self: HybridCausalLM, *arguments: Any) -> Any:
        weight = self.layers[0].linear_attn.out_proj.weight
        right = weight.clone()
        weight.mul_(1.01 if broken == "weight" else torch.nan)
        out = prefill(self, *arguments)
        weight.copy_(right)
        return out

    monkeypatch.setattr(HybridCausalLM, "prefill", wrong)
    output = call(capsys, logit_diff, "--model", checkpoint, "--prompts", prompts({"ids": IDS}), "--json")
    report = json.loads(output.out)
    assert output.status == 1 and not report["passed"]
    assert report["max_rel"] > 1e-3


def test_bfloat16_is_compared_with_float32(
    checkpoint: Path, prompts: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", checkpoint, "--prompts", prompts({"ids": IDS}), "--dtype", "bfloat16", "--json"]
    report = json.loads(call(capsys, logit_diff, *arguments).out)
    assert report["dtype"] == "bfloat16" and report["passed"]
    assert report["max_rel"] > 1e-4  # bfloat16 was really used


def test_fp8_checkpoint(tmp_path: Path, prompts: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Against transformers' own dequantisation, which is right where blocks fill the matrix."""
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    sizes = {"hidden_size": 256, "intermediate_size": 384}
    folder = save_checkpoint(model_of(Spec(NAME, FIXTURES[NAME].config | layers | sizes)), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".mlp." in name]:
        rows, columns = (size // 128 for size in tensors[name].shape)
        blocks = tensors[name].reshape(rows, 128, columns, 128)
        scale = blocks.abs().amax(dim=(1, 3)) / 448
        quantised = (blocks / scale[:, None, :, None]).reshape(tensors[name].shape)
        tensors[name], tensors[f"{name}_scale_inv"] = quantised.to(torch.float8_e4m3fn), scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "linear_attn", "self_attn"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    output = call(capsys, logit_diff, "--model", folder, "--prompts", prompts({"ids": IDS}), "--tolerance", 1e-5)
    assert output.status == 0, output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ('{"txt": "a"}', "line 2 is neither"),
        ('{"text": 3}', "line 2 is neither"),
        ('{"ids": [1, 2.5]}', "line 2 is neither"),
        ('{"ids": [true]}', "line 2 is neither"),
        ('{"text": ""}', "prompt line 2: the prompt is empty"),
        ('{"ids": []}', "prompt line 2: the prompt is empty"),
        ('{"ids": [1, 272]}', "prompt line 2: token id 272 at position 1"),
        ({"ids": [1] * MAX_LENGTH}, f"prompt line 2: the prompt has {MAX_LENGTH} tokens, at most"),
    ],
)
def test_bad_prompts(
    checkpoint: Path,
    artifact: Path,
    prompts: Callable[..., Path],
    line: object,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--model", checkpoint, "--artifacts", artifact, "--prompts", prompts({"ids": [1]}, line)]
    refused(capsys, logit_diff, tmp_path, arguments, message)


def test_bad_arguments(checkpoint: Path, artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", checkpoint]
    (tmp_path / "empty.jsonl").touch()
    copy = shutil.copytree(checkpoint, tmp_path / "copy")  # another time of change: it may be another model
    for arguments, message in [
        ([*model, "--tolerance", -1], "tolerance -1.0 is not possible"),
        ([*model, "--tolerance", "nan"], "tolerance nan is not possible"),
        ([*model, "--prompts", tmp_path / "none.jsonl"], "no prompts file"),
        ([*model, "--prompts", tmp_path / "empty.jsonl"], "has no prompts"),
        ([*model, "--artifacts", tmp_path / "none"], "no artifact at"),
        ([*model, "--artifacts", artifact, "--dtype", "bfloat16"], "is float32, not bfloat16"),
        (["--model", tmp_path / "none"], "no folder"),
        (["--model", "Qwen/Qwen3.5-0.8B"], "hf download Qwen/Qwen3.5-0.8B"),
    ]:
        refused(capsys, logit_diff, tmp_path, arguments, message)
    tensors = load_file(copy / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] * 2}, copy / "model.safetensors")
    refused(capsys, logit_diff, tmp_path, ["--model", copy, "--artifacts", artifact], "from another checkpoint than")
