"""nxdi-qwen-hardware-report with an application that is not NxDI's: the report, what it finds, and every bad input
refused in one line with nothing written. tests/nxdi/test_hardware_report.py runs it on the real NxDI.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nxdi_qwen.compile import hardware_parity, neuron_options
from nxdi_qwen.compile.buckets import Buckets
from nxdi_qwen.compile.executor import EagerExecutor
from nxdi_qwen.compile.rounding import dtype_step
from nxdi_qwen.compile.slot_runner import SlotRunner
from nxdi_qwen.compile.source import ModelSource
from nxdi_qwen.scripts import hardware_report as script
from nxdi_qwen.scripts.hardware_report import hardware_report
from tests.command_line import Output, call, refused
from tests.nxdi.references import write_checkpoint

ROOT = Path(__file__).parents[2]
SLOTS, MAX_LENGTH = 2, 320
QUICK = ("--prompt-lengths", "5,70", "--new-tokens", 3, "--repeat", 2)
SECTIONS = {"load_seconds", "parity", "speed", "memory"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("qwen3_5", tmp_path_factory.mktemp("checkpoints") / "model")


def neuron_config(model: Path, **options: Any) -> dict[str, Any]:
    """The entries that are read, of the file that NxDI writes."""
    defaults = {
        "torch_dtype": "float32",
        "tp_degree": 1,
        "logical_nc_config": 2,
        "start_rank_id": 0,
        "local_ranks_size": 1,
        "kv_cache_batch_size": SLOTS,
        "max_length": MAX_LENGTH,
        "max_context_length": 64,
        "context_encoding_buckets": [64],
        "token_generation_buckets": [128, MAX_LENGTH],
        "continuation_buckets": [64],
        "on_device_sampling_config": None,
        "output_logits": False,
        "is_block_kv_layout": False,
        "async_mode": False,
        "speculation_length": 0,
    }
    hybrid = ModelSource.from_checkpoint(model).config.to_dict()
    return {"hybrid_model": hybrid, "neuron_config": defaults | options}


def write_artifact(folder: Path, model: Path, **options: Any) -> Path:
    (folder / "weights").mkdir(parents=True)
    (folder / "neuron_config.json").write_text(json.dumps(neuron_config(model, **options)))
    (folder / "model.pt").touch()
    (folder / "weights" / "tp0_sharded_checkpoint.safetensors").write_bytes(bytes(1000))
    return folder


@pytest.fixture
def artifact(tmp_path: Path, model: Path) -> Path:
    return write_artifact(tmp_path / "artifact", model)


class Fake:
    """Called like NxDI's applications, answers like the eager model; `change` turns logits [B, V] into others."""

    def __init__(self, model: Path, samples: bool = False, change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        eager = ModelSource.from_checkpoint(model).load(torch.float32)
        self.runner = SlotRunner(EagerExecutor(eager, SLOTS, MAX_LENGTH, Buckets((64, 128))))
        self.samples, self.change = samples, change
        self.models = [SimpleNamespace(is_neuron=lambda: False)]
        self.calls: list[tuple[int, int]] = []

    def __call__(
        self,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        seq_ids: Tensor,
        sampling_params: Tensor,
    ) -> Any:
        rows, tokens = input_ids.shape
        self.calls.append((rows, tokens))
        assert position_ids.shape == input_ids.shape and seq_ids.shape == (rows,) and sampling_params.shape == (rows, 3)
        if not position_ids[:, 0].any():
            assert rows == 1 and attention_mask.shape == (1, tokens) and attention_mask.all()
            assert position_ids[0].tolist() == list(range(tokens))
            logits = self.runner.prefill(int(seq_ids[0]), input_ids[0].tolist())[None]
        else:
            held = [self.runner.lengths[slot] for slot in seq_ids.tolist()]
            assert tokens == 1 and position_ids[:, 0].tolist() == held
            assert attention_mask.sum(dim=1).tolist() == [length + 1 for length in held]
            assert attention_mask.shape[1] == max(held) + 1
            answers = self.runner.decode(dict(zip(seq_ids.tolist(), input_ids[:, 0].tolist(), strict=True)))
            logits = torch.stack([answers[slot] for slot in seq_ids.tolist()])
        logits = self.change(logits)
        if self.samples:
            return SimpleNamespace(logits=None, tokens=logits.argmax(dim=-1))
        return SimpleNamespace(logits=logits[:, None], tokens=logits[:, None])


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], artifact: Path, model: Path, tmp_path: Path
) -> Callable[..., tuple[Output, dict[str, Any]]]:
    """Runs the command as if this machine had a device, with an application that is handed in; returns the file too."""

    def do(load: Callable[[], Any], *options: object) -> tuple[Output, dict[str, Any]]:
        monkeypatch.setattr(script, "check_device", lambda: None)
        monkeypatch.setattr(script, "load_application", lambda artifact: load())
        out = tmp_path / "report.json"
        arguments = ("--artifacts", artifact, "--model", model, "--out", out, *QUICK, *options)
        return call(capsys, hardware_report, *arguments), json.loads(out.read_text())

    return do


Run = Callable[..., tuple[Output, dict[str, Any]]]


def test_the_report(run: Run, model: Path, artifact: Path) -> None:
    fake = Fake(model)
    output, report = run(lambda: fake, "--json")
    assert output.status == 0 and json.loads(output.out) == report
    assert (report["format"], report["format_version"]) == ("nxdi-qwen hardware report", 1)
    assert report["complete"] and report["failures"] == [] and report.keys() >= SECTIONS
    assert report["device"] == "cpu (NxDI CPU mode)"
    described = report["artifact"]
    assert (
        described["neuron_config_sha256"] == hashlib.sha256((artifact / "neuron_config.json").read_bytes()).hexdigest()
    )
    assert (described["name"], described["checkpoint"]) == ("artifact", "model")

    parity = report["parity"]
    assert parity["passed"] and parity["max_rel"] <= 1e-5 and parity["compared"] == "logits"
    assert (parity["positions"], parity["matches"], parity["mismatches"]) == (6 * 17, 6 * 17, 0)
    assert [row["prompt_tokens"] for row in parity["prompts"]] == [1, 3, 64, 65, 130, 100]

    ttft, tpot = report["speed"]["ttft"], report["speed"]["tpot"]
    assert [(row["prompt_tokens"], row["buckets"]) for row in ttft] == [(5, [64]), (70, [64, 64])]
    assert [(row["prompt_tokens"], row["rows"]) for row in tpot] == [(5, 1), (5, 2), (70, 1), (70, 2)]
    assert tpot[0]["buckets"] == [128]
    assert all(len(row["samples_ms"]) == 2 for row in (*ttft, *tpot))
    timed = fake.calls[-2 * 3 * (1 + 3 + 2 + 3) :]  # two lengths, three rounds, of one and of two rows
    assert timed[:4] == [(1, 5), (1, 1), (1, 1), (1, 1)] and timed[-5:] == [(1, 70), (1, 70), *[(2, 1)] * 3]

    memory = report["memory"]
    assert memory["weight_bytes"] == {"tp0_sharded_checkpoint.safetensors": 1000}
    assert memory["state_bytes_per_rank"] == SLOTS * memory["state_bytes_per_slot_and_rank"] > 0
    assert memory["host_rss_bytes"]["value"] > 1e7


def test_the_summary(run: Run, model: Path, tmp_path: Path) -> None:
    output, _ = run(lambda: Fake(model))
    assert output.status == 0
    for text in ("cpu (NxDI CPU mode)", "130 random", "passed: logits; max_rel", "first token", "each further token"):
        assert text in output.out
    assert f"Written to {tmp_path / 'report.json'}" in output.out


def test_a_wrong_port(run: Run, model: Path) -> None:
    output, report = run(lambda: Fake(model, change=lambda logits: logits.roll(1, dims=-1)))
    assert output.status == 1 and "FAILED: logits" in output.out
    parity = report["parity"]
    assert report["complete"] and not parity["passed"] and parity["max_rel"] > 0.1
    assert parity["mismatches"] > 90 and parity["matches"] + parity["near_ties"] + parity["mismatches"] == 102
    assert parity["prompts"][0]["others"][0].keys() >= {"position", "expected", "token", "margin_rel"}


def test_nan_is_counted_and_fails(run: Run, model: Path) -> None:
    output, report = run(lambda: Fake(model, change=lambda logits: logits * torch.nan))
    assert output.status == 1
    assert report["parity"]["non_finite"] == 102 and report["parity"]["max_rel"] is None
    assert report["parity"]["passed"] is False


@pytest.mark.parametrize("right", [True, False])
def test_graphs_that_return_tokens(run: Run, model: Path, artifact: Path, right: bool) -> None:
    greedy = {"do_sample": False, "dynamic": False}
    (artifact / "neuron_config.json").write_text(json.dumps(neuron_config(model, on_device_sampling_config=greedy)))
    output, report = run(lambda: Fake(model, samples=True, change=lambda x: x if right else x.roll(1, dims=-1)))
    parity = report["parity"]
    assert parity["compared"].startswith("tokens only") and parity["max_rel"] is None
    assert (output.status, parity["passed"]) == ((0, True) if right else (1, False))
    assert (parity["matches"] == 102) == right


def test_near_ties_are_counted_apart(run: Run, model: Path, artifact: Path) -> None:
    """In bfloat16 a token may be one of several that the dtype cannot tell apart."""
    (artifact / "neuron_config.json").write_text(json.dumps(neuron_config(model, torch_dtype="bfloat16")))

    def second_best(logits: Tensor) -> Tensor:
        """The two best change places."""
        best = logits.topk(2, dim=-1)
        return logits.scatter(-1, best.indices, best.values.flip(-1))

    _, report = run(lambda: Fake(model, change=second_best))
    others = [other for row in report["parity"]["prompts"] for other in row["others"]]
    assert len(others) == 102
    assert report["parity"]["near_ties"] == sum(other["near_tie"] for other in others)
    assert 0 < report["parity"]["near_ties"] < 102
    assert max(other["margin_rel"] for other in others if other["near_tie"]) < 2**-7
    assert report["parity"]["tolerance"] == 5e-2


@pytest.mark.parametrize(("value", "dtype"), [(1.0, torch.bfloat16), (-5.5, torch.bfloat16), (0.3, torch.float32)])
def test_dtype_step(value: float, dtype: torch.dtype) -> None:
    rounded = torch.tensor(abs(value), dtype=dtype)
    following = torch.nextafter(rounded, torch.tensor(torch.inf, dtype=dtype))
    assert dtype_step(value, dtype) == (following - rounded).item()


def test_times(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only calls move: 10 ms a prompt, 2 ms and 1 ms a row for a step, and the first round is slow."""
    now = 0.0
    seen: set[tuple[int, int, int]] = set()

    class Timed(Fake):
        def __call__(self, **inputs: Tensor) -> Any:
            nonlocal now
            rows, tokens = inputs["input_ids"].shape
            start = int(inputs["position_ids"][0, 0])
            case = (rows, tokens, start)
            now += (0.002 + 0.001 * rows if start else 0.010) + (0 if case in seen else 5.0)
            seen.add(case)
            return super().__call__(**inputs)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    _, report = run(lambda: Timed(model))
    for row in report["speed"]["ttft"]:
        assert row["median_ms"] == pytest.approx(10) and row["max_ms"] == pytest.approx(10)
        assert row["tokens_per_second"] == pytest.approx(row["prompt_tokens"] / 0.010)
    for row in report["speed"]["tpot"]:
        expected = 2 + row["rows"]
        assert row["samples_ms"] == pytest.approx([expected, expected])
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["rows"] / expected)


class Broken(Fake):
    def __call__(self, **inputs: Tensor) -> Any:
        if inputs["input_ids"].shape[0] == 2:
            raise RuntimeError("nrt_execute status 1")
        return super().__call__(**inputs)


def test_a_device_that_fails_is_part_of_the_report(run: Run, model: Path) -> None:
    output, report = run(lambda: Broken(model))
    assert output.status == 1 and "FAILED in parity: RuntimeError: nrt_execute status 1" in output.out
    assert [failure["section"] for failure in report["failures"]] == ["parity", "speed"]
    assert any("hardware_parity.py" in line for line in report["failures"][0]["traceback"])
    assert not report["complete"] and report["parity"] is None and report["memory"] is not None


def test_an_artifact_that_does_not_load(run: Run) -> None:
    def load() -> Any:
        raise RuntimeError("no device")

    output, report = run(load)
    assert output.status == 1 and "it was not loaded" in output.out
    assert [failure["section"] for failure in report["failures"]] == ["load_seconds"]
    assert report["device"] is None and report["speed"] is None and report["memory"] is not None


def test_what_was_measured_survives_the_process(run: Run, model: Path, tmp_path: Path) -> None:
    class Stopped(Fake):
        def __call__(self, **inputs: Tensor) -> Any:
            if inputs["input_ids"].shape[1] == 70:
                raise KeyboardInterrupt
            return super().__call__(**inputs)

    output, _ = run(lambda: Stopped(model))
    assert output.status == 130
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["parity"]["passed"] and report["speed"] is None and not report["complete"]


def test_prompts_that_do_not_fit_are_left_out(run: Run, model: Path, artifact: Path) -> None:
    short = {"max_length": 90, "token_generation_buckets": [90], "continuation_buckets": None}
    (artifact / "neuron_config.json").write_text(json.dumps(neuron_config(model, **short)))
    output, report = run(lambda: Fake(model), "--prompt-lengths", "5")
    assert [row["prompt_tokens"] for row in report["parity"]["prompts"]] == [1, 3, 64]
    assert report["parity"]["skipped"].keys() == {"65 random", "130 random", "100 repeated"}
    assert "above the largest bucket 64" in report["parity"]["skipped"]["65 random"]
    assert output.status == 0 and "prompt 130 random left out" in output.out


def test_parity_needs_host_memory(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware_parity, "available_host_bytes", lambda: {"value": 1000})
    output, report = run(lambda: Fake(model))
    assert output.status == 0 and report["complete"] and report["parity"]["passed"] is None
    assert "and 1000 are available" in report["parity"]["not_run"] and "parity was not run" in output.out


def other_file(name: str) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        (folder / "neuron_config.json").unlink()
        (folder / name).write_text("{}")

    return damage


def edit(**options: Any) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        path = folder / "neuron_config.json"
        content = json.loads(path.read_text())
        content["neuron_config"] |= options
        path.write_text(json.dumps(content))

    return damage


def lose(*names: str) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        path = folder / "neuron_config.json"
        content = json.loads(path.read_text())
        for name in names:
            content.pop(name, None)
            content["neuron_config"].pop(name, None)
        path.write_text(json.dumps(content))

    return damage


ARTIFACTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda at: at.rename(at.with_name("moved")), "no artifact at "),
    "no configuration": (lambda at: (at / "neuron_config.json").unlink(), "it has no neuron_config.json"),
    "target cpu": (other_file("manifest.json"), "it is one of the target cpu"),
    "target hlo": (other_file("report.json"), "lowered graphs of the target hlo, which are not run"),
    "not JSON": (lambda at: (at / "neuron_config.json").write_text("{"), "it is not JSON"),
    "another model of NxDI": (lose("hybrid_model"), "describes no model of this project"),
    "another version": (lose("tp_degree"), "lacks what this version reads ('tp_degree')"),
    "no graphs": (lambda at: (at / "model.pt").unlink(), "model.pt is missing"),
    "a rank's weights": (edit(local_ranks_size=2), "weights/tp1_sharded_checkpoint.safetensors is missing"),
    "block KV": (edit(is_block_kv_layout=True), "is_block_kv_layout=True, which is not measured"),
    "random tokens": (edit(on_device_sampling_config={"do_sample": True, "dynamic": False}), "tokens at random"),
}


@pytest.mark.parametrize("case", ARTIFACTS)
def test_a_folder_that_is_no_artifact(
    case: str, artifact: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, message = ARTIFACTS[case]
    damage(artifact)
    arguments = ["--artifacts", artifact, "--model", model, "--out", tmp_path / "report.json"]
    refused(capsys, hardware_report, tmp_path, arguments, message)


OPTIONS: dict[str, tuple[list[object], str]] = {
    "prompt too long": (["--prompt-lengths", "300"], "300 tokens and 64 new ones do not fit the artifact's maximum"),
    "prompt lengths": (["--prompt-lengths", "0"], "--prompt-lengths must be numbers from 1"),
    "no prompt length": (["--prompt-lengths", ""], "--prompt-lengths must be numbers from 1"),
    "no default length fits": (["--new-tokens", 200], "no default prompt length fits"),
    "new tokens": (["--new-tokens", 0], "--new-tokens 0 is not possible"),
    "repeat": (["--repeat", 0], "--repeat 0 is not possible"),
    "no model": (["--model", "nowhere"], "nowhere"),
    "folder of the report": (["--out", "nowhere/report.json"], "no folder nowhere"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_bad_options(
    case: str, artifact: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, message = OPTIONS[case]
    arguments = ["--artifacts", artifact, "--model", model, "--out", tmp_path / "report.json", *options]
    refused(capsys, hardware_report, tmp_path, arguments, message)


def test_another_checkpoint(
    artifact: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_checkpoint("qwen3_5_tied", tmp_path_factory.mktemp("other"))
    arguments = ["--artifacts", artifact, "--model", other, "--out", tmp_path / "report.json"]
    refused(capsys, hardware_report, tmp_path, arguments, "was compiled for another model than --model")


def test_an_existing_report(artifact: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.json").write_text("stays")
    arguments = ["--artifacts", artifact, "--model", model, "--out", tmp_path / "mine.json"]
    refused(capsys, hardware_report, tmp_path, arguments, "exists: remove it, or choose another file")


def test_without_the_sdk_and_without_a_device(
    artifact: Path,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ["--artifacts", artifact, "--model", model, "--out", tmp_path / "report.json"]
    monkeypatch.setattr(neuron_options, "_is_installed", lambda name: False)
    refused(capsys, hardware_report, tmp_path, arguments, "needs the Neuron SDK with NxDI")
    monkeypatch.setattr(neuron_options, "_is_installed", lambda name: True)
    monkeypatch.setattr(script, "device_files", lambda: [])
    refused(capsys, hardware_report, tmp_path, arguments, "this machine has no Neuron device")


def test_the_command_is_installed(tmp_path: Path) -> None:
    commands = {entry.name: entry for entry in entry_points(group="console_scripts")}
    assert callable(commands["nxdi-qwen-hardware-report"].load())
    program = [sys.executable, str(ROOT / "scripts" / "hardware_report.py"), "--help"]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("usage: ")
