"""logit-diff: passes a right port, fails a wrong one with status 1, refuses bad input with status 2."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nxdi_qwen.modeling.model import HybridCausalLM
from nxdi_qwen.parity.runs import STEPS
from nxdi_qwen.parity.targets.huggingface import HuggingFaceSide
from nxdi_qwen.scripts.logit_diff import logit_diff
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


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by the tests, so that every reference is computed once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def base(checkpoint: Path, cache: Path) -> list[object]:
    return ["--model", checkpoint, "--cache", cache]


@pytest.fixture
def prompts(tmp_path: Path) -> Callable[..., Path]:
    """Writes lines into a prompts file."""

    def write(*lines: object) -> Path:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write


def test_artifact_with_the_built_in_prompts(
    base: list[object], artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = call(capsys, logit_diff, *base, "--artifacts", artifact)
    assert output.status == 0, output
    for text in ("129 random", "100 alternating", "70 with pad and end ids", "224 long", "code"):
        assert text in output.out
    assert "FAILED" not in output.out


def test_json_has_every_position(
    base: list[object], artifact: Path, prompts: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = prompts({"text": "héllo"}, "", {"ids": IDS})
    for target in ([], ["--artifacts", artifact]):
        output = call(capsys, logit_diff, *base, *target, "--prompts", file, "--json", "--tolerance", 1e-5)
        report = json.loads(output.out)
        assert output.status == 0 and report["passed"]
        assert report["reference"]["kind"] == "huggingface"
        assert report["reference"]["versions"]["transformers"] == "5.24.0"
        assert report["reference"]["model_sha256"] == report["target"]["model_sha256"]
        assert [row["prompt"] for row in report["prompts"]] == ["line 1", "line 3"]
        for row in report["prompts"]:
            assert (row["tokens"], row["steps"]) == (6, STEPS)
            assert len(row["positions_rel"]) == 6 + STEPS and max(row["positions_rel"]) <= 1e-5
            assert all(row["top1"]) and row["states_rel"]["layers.0.recurrent"]
            assert row["hidden_rel"] is not None


@pytest.mark.parametrize("broken", ["weight", "nan"])
def test_a_wrong_port_fails_with_status_1(
    base: list[object],
    prompts: Callable[..., Path],
    broken: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One weight 1 % off leaves most tokens as they are; only the logits show it. NaN must never count as small."""
    prefill = HybridCausalLM.prefill

    def wrong(self: HybridCausalLM, *arguments: Any) -> Any:
        # Of the layer that runs alone in the search, too.
        weight = next(layer for layer in self.layers if hasattr(layer, "linear_attn")).linear_attn.out_proj.weight
        right = weight.clone()
        weight.mul_(1.01 if broken == "weight" else torch.nan)
        out = prefill(self, *arguments)
        weight.copy_(right)
        return out

    monkeypatch.setattr(HybridCausalLM, "prefill", wrong)
    output = call(capsys, logit_diff, *base, "--prompts", prompts({"ids": IDS}), "--json")
    report = json.loads(output.out)
    assert output.status == 1 and not report["passed"]
    if broken == "nan":
        assert report["lines"][0].startswith("line 1: NaN in the target's hidden states, layer 0, prefill")
    else:
        assert max(report["prompts"][0]["positions_rel"]) > 1e-3
        assert report["drill"]["place"]["layer"] == 0


def test_bfloat16_is_compared_three_ways(
    base: list[object], prompts: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*base, "--prompts", prompts({"ids": IDS}), "--dtype", "bfloat16", "--json"]
    report = json.loads(call(capsys, logit_diff, *arguments).out)
    assert report["target"]["dtype"] == report["sixteen_bit"]["dtype"] == "bfloat16" and report["passed"]
    (row,) = report["prompts"]
    assert max(row["positions_rel"]) > 1e-4  # bfloat16 was really used
    assert row["three_way"]
    two_way = json.loads(call(capsys, logit_diff, *arguments, "--sixteen-bit", "none").out)
    assert two_way["sixteen_bit"] is None and two_way["prompts"][0]["three_way"] == []


def test_references_are_computed_once_and_found_again_after_an_interruption(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    run = HuggingFaceSide.run

    def counted(self: HuggingFaceSide, prompt: Any, *arguments: Any) -> Any:
        ran.append(prompt.name)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return run(self, prompt, *arguments)

    monkeypatch.setattr(HuggingFaceSide, "run", counted)
    (file := tmp_path / "prompts.jsonl").write_text('{"ids": [1, 2]}\n{"ids": [3]}\n')
    arguments = ["--model", checkpoint, "--cache", tmp_path / "cache", "--prompts", file]
    assert call(capsys, logit_diff, *arguments).status == 130
    assert call(capsys, logit_diff, *arguments).status == 0
    assert ran == ["line 1", "line 2", "line 2"]
    assert call(capsys, logit_diff, *arguments).status == 0
    assert len(ran) == 3


def test_stored_results_stand_for_either_side(
    base: list[object], tmp_path: Path, prompts: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    kept, own = tmp_path / "reference", tmp_path / "own"
    file = prompts({"ids": IDS}, {"text": "ab"})
    alone = ["--target", "huggingface", "--reference", "none", "--prompts", file, "--save", kept]
    assert "stored:" in call(capsys, logit_diff, *base, *alone).out
    output = call(capsys, logit_diff, *base, "--reference", f"stored:{kept}", "--save", own, "--tolerance", 1e-5)
    assert output.status == 0 and "line 2" in output.out
    # Without the checkpoint, and without transformers.
    both = ["--reference", f"stored:{kept}", "--target", f"stored:{own}", "--cache", tmp_path / "cache"]
    output = call(capsys, logit_diff, *both, "--tolerance", 1e-5)
    assert output.status == 0, output
    # What another machine has computed, beside the reference here.
    assert call(capsys, logit_diff, *base, "--target", f"stored:{own}").status == 0


def test_fp8_checkpoint(
    tmp_path: Path, cache: Path, prompts: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
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
    arguments = ["--model", folder, "--cache", cache, "--prompts", prompts({"ids": IDS}), "--tolerance", 1e-5]
    output = call(capsys, logit_diff, *arguments)
    assert output.status == 0, output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ('{"text": ""}', "prompt line 2: the prompt is empty"),
        ('{"ids": []}', "prompt line 2: the prompt is empty"),
        ('{"ids": [1, 272]}', "prompt line 2: token id 272 at position 1"),
        ({"ids": [1] * MAX_LENGTH}, f"prompt line 2: the prompt has {MAX_LENGTH} tokens, at most"),
    ],
)
def test_bad_prompts(
    base: list[object],
    artifact: Path,
    prompts: Callable[..., Path],
    line: object,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [*base, "--artifacts", artifact, "--prompts", prompts({"ids": [1]}, line)]
    refused(capsys, logit_diff, tmp_path, arguments, message)


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails where a model is loaded."""
    for name in ("model", "run"):
        monkeypatch.setattr(HuggingFaceSide, name, None)
    monkeypatch.setattr(HybridCausalLM, "prefill", None)
    yield


@pytest.mark.usefixtures("nothing_runs")
def test_bad_arguments(
    base: list[object], checkpoint: Path, artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.jsonl").touch()
    copy = shutil.copytree(checkpoint, tmp_path / "copy")  # another time of change: it may be another model
    (tmp_path / "file").touch()
    for arguments, message in [
        ([*base, "--tolerance", -1], "tolerance -1.0 is not possible"),
        ([*base, "--tolerance", "nan"], "tolerance nan is not possible"),
        ([*base, "--cache-size", "nan"], "cache size nan is not possible"),
        ([*base, "--prompts", tmp_path / "none.jsonl"], "no prompts file"),
        ([*base, "--prompts", "lengths,nonsense"], "there are lengths, repeated, special, long, text"),
        ([*base, "--prompts", tmp_path / "empty.jsonl"], "has no prompts"),
        ([*base, "--artifacts", tmp_path / "none"], "no artifact at"),
        ([*base, "--artifacts", artifact, "--dtype", "bfloat16"], "is float32, not bfloat16"),
        ([*base, "--target", "nonsense"], "nonsense is no side to compare: give huggingface"),
        ([*base, "--target", "eager:float16"], "eager:float16 is no side to compare"),
        ([*base, "--target", "stored"], "stored is no side to compare"),
        ([*base, "--target", f"stored:{tmp_path / 'none'}"], "no stored results in"),
        ([*base, "--target", "nxdi"], "nxdi needs NxDI, and neuronx_distributed"),
        ([*base, "--target", "lowered"], "lowered needs NxDI, and neuronx_distributed"),
        ([*base, "--reference", "none"], "without a reference nothing is compared"),
        ([*base, "--reference", "server:http://localhost:1/v1"], "a server tells too little"),
        (["--model", checkpoint, "--cache", tmp_path / "file" / "x"], "cannot write the cache"),
        ([], "this needs the checkpoint: give its folder with --model"),
        (["--model", tmp_path / "none"], "no folder"),
        (["--model", "Qwen/Qwen3.5-0.8B"], "hf download Qwen/Qwen3.5-0.8B"),
    ]:
        refused(capsys, logit_diff, tmp_path, arguments, message)
    tensors = load_file(copy / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] * 2}, copy / "model.safetensors")
    refused(capsys, logit_diff, tmp_path, ["--model", copy, "--artifacts", artifact], "from another checkpoint than")


def test_what_was_kept_of_another_model_or_is_damaged(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, kept = tmp_path / "cache", tmp_path / "kept"
    base = ["--model", checkpoint, "--cache", cache, "--prompts", "long"]
    assert call(capsys, logit_diff, *base, "--save", kept).status == 0
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    # The same content is the same model wherever it lies.
    assert call(capsys, logit_diff, "--model", copy, "--cache", cache, "--target", f"stored:{kept}").status == 0
    tensors = load_file(copy / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] * 2}, copy / "model.safetensors")
    arguments = ["--model", copy, "--cache", cache, "--target", f"stored:{kept}"]
    output = call(capsys, logit_diff, *arguments)
    assert output.status == 2 and "are of different models" in output.err
    for folder, mend, more in [(cache, "remove it, or", []), (kept, "copy it again", ["--target", f"stored:{kept}"])]:
        (file,) = folder.glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-1])
        refused(capsys, logit_diff, tmp_path, [*base, *more], mend)
        refused(capsys, logit_diff, tmp_path, [*base, *more], f"{file.name} is truncated")
