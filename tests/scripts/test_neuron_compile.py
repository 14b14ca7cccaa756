"""neuron-compile: what it writes and prints, and every bad input refused in one line with nothing written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nxdi_qwen.compile import cpu
from nxdi_qwen.compile.artifact import open_artifact
from nxdi_qwen.scripts.neuron_compile import compile_model
from tests.artifacts import checkpoint_of
from tests.command_line import call, refused
from tests.hf_fixtures import write_tensors

ROOT = Path(__file__).parents[2]
NAME = "qwen3_5"


@pytest.fixture
def model(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    """A copy of a checkpoint, to be damaged."""
    return Path(shutil.copytree(checkpoint_of(tmp_path_factory, NAME), tmp_path / "model"))


def test_compiles_a_checkpoint(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "artifact"
    options = ("--batch-size", 2, "--max-length", 100, "--buckets", "64", "--dtype", "bfloat16", "--degree", 1)
    output = call(capsys, compile_model, "--model", model, "--target", "cpu", "--out", out, *options, "--json")
    assert output.status == 0
    result = json.loads(output.out)
    assert result["artifact"] == str(out) and result["model"] == "model"
    assert (result["slots"], result["max_length"], result["dtype"]) == (2, 100, "bfloat16")
    assert {name.split(".")[0] for name in result["graphs"]} == {"context_64", "continuation_64", "decode", "head"}
    manifest = open_artifact(out, verify=True)
    assert (manifest.slots, manifest.max_length, manifest.buckets, manifest.dtype) == (2, 100, (64,), "bfloat16")
    assert result["weight_bytes"] == (out / manifest.weights[0].file).stat().st_size
    # K and V of the attention layer, conv and float32 recurrent state of the GDN layer; see the fixture's sizes.
    kv, conv, recurrent = 2 * 2 * 100 * 32 * 2, (2 * 2 * 32 + 6 * 24) * 3 * 2, 6 * 32 * 24 * 4
    assert result["state_bytes_per_slot"] == kv + conv + recurrent
    assert "graphs" in output.err and "weights" in output.err  # the progress bars


def test_compiles_for_several_ranks(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "graph_specs", lambda *_: [])  # graphs take time, and are the same at every degree
    arguments = ("--model", model, "--target", "cpu", "--degree", 2)
    output = call(capsys, compile_model, *arguments, "--out", tmp_path / "out", "--json")
    result = json.loads(output.out)
    assert (result["degree"], result["expert_degree"]) == (2, 1)
    files = sorted((tmp_path / "out" / "weights").iterdir())
    assert [file.name for file in files] == [f"tp{rank}_sharded_checkpoint.safetensors" for rank in range(2)]
    assert result["weight_bytes"] == sum(file.stat().st_size for file in files)
    whole = json.loads(call(capsys, compile_model, *arguments[:-1], 1, "--out", tmp_path / "one", "--json").out)
    assert result["state_bytes_per_slot"] == whole["state_bytes_per_slot"] / 2
    output = call(capsys, compile_model, *arguments, "--out", tmp_path / "two")
    assert "torchrun --nproc-per-node 2 -m nxdi_qwen.scripts.generate --artifacts" in output.out


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def lose_a_shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    write_tensors(tensors, folder, shards=2)
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
LINEAR, FULL = "linear_attention", "full_attention"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "no folder "),
    "no config": (lambda at: (at / "config.json").unlink(), "no config.json in "),
    "config not JSON": (lambda at: (at / "config.json").write_text("{"), "config.json"),
    "unknown model type": (
        lambda at: edit_config(at, model_type="qwen4_exp"),
        "model_type 'qwen4_exp' is not supported",
    ),
    "layer types too few": (lambda at: edit_config(at, layer_types=[FULL]), "layer_types has 1 entries"),
    "layer types unknown": (lambda at: edit_config(at, layer_types=[LINEAR, "sliding"]), "layer_types[1]"),
    "layer types of another model": (lambda at: edit_config(at, layer_types=[FULL, LINEAR]), "model.layers.0."),
    "missing tensor": (lambda at: edit_tensors(at, lambda tensors: tensors.pop(Q_PROJ)), Q_PROJ),
    "extra tensor": (
        lambda at: edit_tensors(at, lambda tensors: tensors.update({"model.layers.1.extra.weight": torch.ones(2)})),
        "model.layers.1.extra.weight",
    ),
    "misshapen tensor": (
        lambda at: edit_tensors(at, lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ][:-1]})),
        Q_PROJ,
    ),
    "truncated tensor": (truncate, "model.safetensors"),
    "absent shard": (lose_a_shard, "model-00002-of-00002.safetensors"),
    "no weights": (lambda at: (at / "model.safetensors").unlink(), "has no weights"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_checkpoint_is_refused(
    case: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, message = DAMAGES[case]
    damage(model)
    arguments = ["--model", model, "--target", "cpu", "--out", tmp_path / "new" / "artifact"]
    refused(capsys, compile_model, tmp_path, arguments, message)


def existing_out(folder: Path) -> list[object]:
    (folder / "mine").mkdir()
    (folder / "mine" / "file").write_text("stays")
    return ["--out", folder / "mine"]


OPTIONS: dict[str, tuple[list[object], str]] = {
    "bucket off the grid": (["--buckets", "64,100"], "bucket 100 is not on the grid of 64 tokens: use 128"),
    "bucket too long": (["--buckets", "128", "--max-length", "64"], "bucket 128 is longer than the maximum length 64"),
    "bucket no number": (["--buckets", "64,x"], "'64,x' is not a comma-separated list of whole numbers"),
    "no bucket": (["--buckets", ""], "no bucket given"),
    "degree": (["--degree", 3], "degree 3 does not fit linear_num_key_heads 2: use a divisor or a multiple of it"),
    "degree 0": (["--degree", 0], "degree 0 is out of range: use 1 to 64"),
    "expert degree": (["--degree", 2, "--expert-degree", 2], "expert degree 2 is for models with experts"),
    "uneven expert degree": (["--degree", 2, "--expert-degree", 3], "expert degree 3 does not divide degree 2"),
    "batch size": (["--batch-size", 0], "batch size 0 is not possible"),
    "maximum length": (["--max-length", 5000], "maximum length 5000 is out of range: model takes 1 to 4096 tokens"),
    "dtype": (["--dtype", "float16"], "argument --dtype: invalid choice"),
    "target": (["--target", "gpu"], "argument --target: invalid choice"),
    "unknown option": (["--bucket-size", 3], "unrecognized arguments"),
    "random weights": (["--random-weights"], "--random-weights goes with --preset"),
    "model and preset": (["--preset", "qwen3.5-0.8b"], "not allowed with argument --model"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_bad_options_are_refused(case: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, message = OPTIONS[case]
    arguments = ["--model", model, "--target", "cpu", "--out", tmp_path / "new" / "artifact", *options]
    refused(capsys, compile_model, tmp_path, arguments, message)


def test_an_existing_destination_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", model, "--target", "cpu", "--out", model]
    refused(capsys, compile_model, tmp_path, arguments, f"{model} exists: remove it, or choose another folder")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "Qwen/Qwen3.5-0.8B"], "hf download Qwen/Qwen3.5-0.8B --local-dir Qwen3.5-0.8B"),
        (["--preset", "qwen3.5-0.8b"], "a preset has no weights: add --random-weights"),
        (["--preset", "qwen9", "--random-weights"], "qwen3.5-0.8b"),
        (["--preset", "qwen3.5-0.8b", "--random-weights", "--degree", "3"], "degree 3 does not fit"),
        ([], "one of the arguments --model --preset is required"),
    ],
)
def test_a_model_that_is_not_there(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*arguments, "--target", "cpu", "--out", str(tmp_path / "out")]
    refused(capsys, compile_model, tmp_path, arguments, message)


def test_console_scripts() -> None:
    commands = {entry.name: entry for entry in entry_points(group="console_scripts")}
    for name in ("neuron-compile", "nxdi-qwen-generate", "logit-diff"):
        assert callable(commands[name].load())


@pytest.mark.parametrize("name", ["neuron_compile", "generate", "logit_diff"])
def test_a_script_runs_directly(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / f"{name}.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")
