"""The benchmark: a whole small run, what it makes of figures, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from nxdi_qwen.compile.cpu import compile_cpu
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.scripts.benchmark import benchmark
from nxdi_qwen.scripts.benchmarks import cost, report, speed
from nxdi_qwen.scripts.benchmarks.cost import Cost, Point
from nxdi_qwen.scripts.benchmarks.serve import Round, Serve
from nxdi_qwen.scripts.benchmarks.speed import Speed, Task, Timing
from tests.artifacts import OPTIONS, artifact_of, checkpoint_of
from tests.command_line import call, refused

SPEED = Speed(
    model="small",
    versions={"torch": "2"},
    rounds=3,
    tasks=(Task("prefill 8", "prefill 8", 8, "matmul", 2e9), Task("GDN operation 64", "operation 64", 64, None, 0.0)),
    timings=(
        Timing("prefill 8", "ours", (0.1, 0.2, 0.4)),
        Timing("prefill 8", "other", (0.3, 0.4, 0.4)),
        Timing("GDN operation 64", "ours", (0.1, 0.1, 0.1)),
    ),
    floors={"read": (1e9, 2e9, 3e9), "matmul": (2e10, 4e10, 1e10)},
    memory={"load and run": 3 * 10**9},
    weights=10**9,
    parity=1e-6,
)


def test_ratios_are_of_one_round_and_floors_of_this_run() -> None:
    assert SPEED.ratio("prefill 8", "other") == pytest.approx(2.0)  # the median of 3, 2 and 1
    assert SPEED.ratio("GDN operation 64", "other") is None
    assert [SPEED.floor_seconds(task) for task in SPEED.tasks] == [pytest.approx(0.1), None]
    figures = json.loads(json.dumps(report.speed_figures(SPEED)))
    assert figures["derived"]["prefill 8"]["times_as_fast_as"] == {"other": pytest.approx(2.0)}


def test_table_and_plot_of_speed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report.print_speed(SPEED)
    out = " ".join(capsys.readouterr().out.split())  # the table is as wide as the terminal
    assert "2.00 x" in out
    assert "peak memory of a process: load and run 3.00 GB; 1.3 x weights + 800 MB is 2.10 GB" in out
    report.plot_speed(SPEED, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_exponents_and_shares() -> None:
    points = [
        Point(kind, phase, tokens, ((tokens / 100) ** power,) * 3, 7)
        for kind, power in (("linear_attention", 1), ("full_attention", 2))
        for phase in ("prefill", "decode")
        for tokens in (100, 200, 400)
    ]
    result = Cost("small", "bfloat16", 1, {"linear_attention": 3, "full_attention": 1}, tuple(points))
    assert result.exponents() == {
        f"{kind}, {phase}": pytest.approx(power)
        for kind, power in (("linear_attention", 1), ("full_attention", 2))
        for phase in ("prefill", "decode")
    }
    assert result.attention_share("decode", 200) == pytest.approx(4 / (4 + 3 * 2))


def test_cost_of_growing_contexts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cost, "DECODE_CONTEXTS", (1, 300))
    monkeypatch.setattr(cost, "PREFILL_TOKENS", (64, 300))
    files = ("--json", tmp_path / "cost.json", "--plot", tmp_path / "cost.png")
    output = call(capsys, benchmark, "cost", "--rounds", 1, *files)
    assert output.status == 0 and "seconds grow with tokens to the power" in output.out
    figures = json.loads((tmp_path / "cost.json").read_text())
    states = {(p["kind"], p["phase"], p["tokens"]): p["state_bytes"] for p in figures["points"]}
    # Recurrent [16, 128, 128] float32 and conv [6144, 3] bfloat16; keys and values of 2 heads of 256 a token.
    assert {n for key, n in states.items() if key[0] == "linear_attention"} == {16 * 128 * 128 * 4 + 6144 * 3 * 2}
    assert states["full_attention", "prefill", 300] == 300 * 2 * 2 * 256 * 2
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")


def tiny_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Artifacts of exported programs, in float32, instead of minutes of compiling; short tasks."""

    def build(model: Path, source: Any, out: Path, build: Any) -> bool:
        compile_cpu(source, out, dataclasses.replace(OPTIONS, slots=build.slots))
        return True

    monkeypatch.setattr(speed, "build_artifact", build)
    monkeypatch.setattr(speed, "_PARITY_PROMPTS", (1, 65))
    monkeypatch.setattr(speed, "PREFILL_TOKENS", (65,))
    monkeypatch.setattr(speed, "DECODE", ((1, 8), (8, 4)))
    monkeypatch.setattr(speed, "OPERATION_TOKENS", 64)


@pytest.mark.slow
def test_a_whole_run_against_transformers(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tiny_builds(monkeypatch)
    model = checkpoint_of(tmp_path_factory, "qwen3_5")
    arguments = ("speed", "--model", model, "--work", tmp_path / "work", "--rounds", 2, "--json", tmp_path / "s.json")
    output = call(capsys, benchmark, *arguments)
    assert output.status == 0, output.err
    figures = json.loads((tmp_path / "s.json").read_text())
    assert figures["parity"] <= 1e-5
    assert {(t["task"], t["peer"]) for t in figures["timings"]} == {
        (task, peer)
        for task in ("prefill 65", "decode, batch 1", "decode, batch 8", "GDN operation 64")
        for peer in ("ours", "transformers")
    }
    assert all(len(timing["seconds"]) == 2 and min(timing["seconds"]) > 0 for timing in figures["timings"])
    assert figures["memory"].keys() == {"compile", "load and run"}


def test_a_wrong_build_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(speed, "_PARITY_PROMPTS", (65,))
    monkeypatch.setattr(speed, "PARITY_TOLERANCE", 1e-9)
    artifact = artifact_of(tmp_path_factory, "qwen3_5")
    with pytest.raises(InputError, match="the float32 build is wrong"):
        speed.check_parity(checkpoint_of(tmp_path_factory, "qwen3_5"), artifact, tmp_path, lambda *_: None)


def test_a_peer_that_fails_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match="transformers failed in its process: "),
        speed._worker(sys.executable, "transformers", tmp_path / "nothing"),
    ):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cost", "--rounds", "0"), "0 rounds measure nothing"),
        (("cost", "--preset", "qwen9"), "qwen9"),
        (("cost", "--plot", "cost.svg"), "--plot writes a PNG"),
        (("cost", "--json", "missing/cost.json"), "no folder missing"),
        (("cost", "--json", "."), "--json: . is a folder: give the name of a file"),
        (("speed", "--model", "missing", "--work", "work"), "missing"),
        (("speed", "--model", "m", "--work", "w", "--vllm-python", "missing"), "no Python at missing"),
    ],
)
def test_bad_input(
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(capsys, benchmark, tmp_path, arguments, message)


SERVE = Serve(
    model="small",
    versions={"vllm": "0"},
    rounds=tuple(
        Round(peer, seconds, (seconds,) * 16)
        for ours, theirs in ((1.0, 2.0), (4.0, 4.0), (8.0, 4.0))
        for peer, seconds in (("ours", ours), ("vllm", theirs))
    ),
)


def test_ratio_table_and_plot_of_serving(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert SERVE.ratio() == pytest.approx(1.0)  # the median of 2, 1 and 0.5
    assert SERVE.throughput("ours")[0] == pytest.approx(16 * 32)
    figures = json.loads(json.dumps(report.serve_figures(SERVE)))
    assert figures["derived"]["tokens_per_second"] == {"ours": pytest.approx(128.0), "vllm": pytest.approx(128.0)}
    report.print_serve(SERVE)
    assert "1.00 times the tokens" in capsys.readouterr().out
    report.plot_serve(SERVE, tmp_path / "serve.png")
    assert (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")


def test_serving_is_refused_without_a_python_that_has_vllm(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["serve", "--model", str(tmp_path), "--work", str(tmp_path / "work")]
    refused(capsys, benchmark, tmp_path, [*arguments, "--vllm-python", str(tmp_path / "none")], "no Python at")
    refused(capsys, benchmark, tmp_path, arguments, "--vllm-python")
