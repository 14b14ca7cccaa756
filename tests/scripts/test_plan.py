"""nxdi-qwen-plan: table, JSON and plot, and every bad input refused in one line with nothing written."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from nxdi_qwen.scripts.plan import plan_model
from tests.artifacts import checkpoint_of
from tests.command_line import call, refused

NAME = "qwen3_next_mixed"  # tied
DENSE = ("--preset", "qwen3.5-27b", "--instance", "trn2.3xlarge", "--degree", 4)


def widest(text: str) -> int:
    """An address is never broken, however long it is."""
    return max(len(line) for line in text.splitlines() if "https://" not in line)


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    output = call(capsys, plan_model, *DENSE, "--batch-size", 8)
    assert output.status == 0 and output.err == ""
    text = output.out
    assert widest(text) <= 100
    assert "ROOFLINE FLOOR, NOTHING MEASURED ON HARDWARE" in text
    assert "qwen3.5-27b, bfloat16, degree 4 on trn2.3xlarge" in text
    assert "24.00 GiB, of which 2.00 reserved" in text and "12.53 GiB, which leaves 9.47 for slots" in text
    assert "largest context of 8 slots" in text and "https://awsdocs-neuron.readthedocs-hosted.com" in text
    assert "…" not in text  # nothing was cut
    cells = {line.split("│")[1].strip(): line for line in text.splitlines() if line.startswith("│")}
    assert {"1,024", "2,048", "4,096", "16,384", "65,536", "262,144"} <= cells.keys()


def test_the_largest_numbers_fit_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ("qwen3.5-0.8b", "trn2.48xlarge", 1, "--dtype", "float32"),
        ("qwen3-next-80b-a3b", "trn2.48xlarge", 32, "--expert-degree", 32, "--batch-size", 100),
        ("qwen3.5-397b-a17b", "trn2.48xlarge", 64, "--batch-size", 4),
    ):
        preset, instance, degree, *rest = arguments
        output = call(capsys, plan_model, "--preset", preset, "--instance", instance, "--degree", degree, *rest)
        assert output.status == 0, output
        assert widest(output.out) <= 100 and "…" not in output.out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    output = call(capsys, plan_model, *DENSE, "--logical-cores", 2, "--max-length", 3000, "--json")
    values = json.loads(output.out)
    assert output.status == 0 and "nothing measured on hardware" in values["label"]
    assert values["machine"]["cores"] == 4 and values["max_length"] == 3000 and values["batch"] == 1
    (row,) = (row for row in values["contexts"] if row["context"] == 3000)
    assert row["slots"] == values["free_bytes"] // (row["kv_bytes_per_slot"] + row["state_bytes_per_slot"])
    assert row["decode_one"] == values["decode"] and row["decode_all"]["batch"] == row["slots"]


def test_logical_cores(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--preset", "qwen3.5-9b", "--instance", "trn3-chip", "--degree", 8, "--logical-cores", 1, "--json"]
    values = json.loads(call(capsys, plan_model, *arguments).out)
    assert (values["machine"]["cores"], values["machine"]["memory_bytes"]) == (8, 18 << 30)
    assert call(capsys, plan_model, *arguments[:-3], "--json").status == 2  # 4 cores of 2


def test_the_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    output = call(capsys, plan_model, *DENSE, "--plot", tmp_path / "slots.png")
    assert output.status == 0 and "slots" in output.out
    content = (tmp_path / "slots.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n")
    width, height = struct.unpack(">II", content[16:24])
    assert width >= 600 and height >= 400


def test_a_checkpoint_and_its_configuration_alone(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    model = checkpoint_of(tmp_path_factory, NAME)
    shutil.copy(model / "config.json", tmp_path)
    arguments = ["--instance", "trn2.3xlarge", "--degree", 2, "--json"]
    whole = call(capsys, plan_model, "--model", model, *arguments)
    bare = call(capsys, plan_model, "--model", tmp_path, *arguments)
    assert (whole.status, bare.status) == (0, 0)
    assert "has no weights: planned from config.json alone" in bare.err and "planned from" not in whole.err
    values, other = json.loads(whole.out), json.loads(bare.out)
    assert values["weight_bytes"] == other["weight_bytes"] and values["contexts"] == other["contexts"]
    assert values["model"] == model.name and values["max_length"] == 2048


def test_matplotlib_is_optional(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(
        capsys, plan_model, tmp_path, [*DENSE, "--plot", tmp_path / "a.png"], "--plot needs matplotlib: pip install"
    )
    assert call(capsys, plan_model, *DENSE).status == 0


def test_matplotlib_is_not_imported_without_a_plot() -> None:
    code = "import sys; import nxdi_qwen.scripts.plan; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


MODEL = ["--preset", "qwen3.5-27b"]
PLACE = ["--instance", "trn2.3xlarge"]
REFUSED: dict[str, tuple[list[object], str]] = {
    "no model": ([*PLACE, "--degree", 4], "one of the arguments --model --preset is required"),
    "unknown preset": (["--preset", "qwen9", *PLACE, "--degree", 4], "no preset 'qwen9'; there are qwen3.5-0.8b"),
    "no folder": (["--model", "/no/such/folder", *PLACE, "--degree", 4], "/no/such/folder"),
    "unknown instance": ([*MODEL, "--instance", "inf2.xlarge", "--degree", 4], "trn2.48xlarge"),
    "no degree": ([*MODEL, *PLACE], "--degree"),
    "degree is no number": ([*MODEL, *PLACE, "--degree", "two"], "invalid int value: 'two'"),
    "too many cores": ([*MODEL, *PLACE, "--degree", 16], "the nearest that fits is --degree 4"),
    "refused by the model": ([*MODEL, *PLACE, "--degree", 3], "the nearest that fits is --degree 4"),
    "too little memory": ([*MODEL, *PLACE, "--degree", 1], "the nearest that fits is --degree 4"),
    "another instance": (
        ["--preset", "qwen3.5-122b-a10b", *PLACE, "--degree", 4],
        "the nearest that fits is --degree 16 --instance trn2.48xlarge",
    ),
    "expert degree": ([*MODEL, *PLACE, "--degree", 4, "--expert-degree", 2], "--degree 4 --expert-degree 1"),
    "logical cores": ([*MODEL, *PLACE, "--degree", 4, "--logical-cores", 3], "choose from 1, 2"),
    "dtype": ([*MODEL, *PLACE, "--degree", 4, "--dtype", "int8"], "choose from"),
    "batch": ([*MODEL, *PLACE, "--degree", 4, "--batch-size", 500], "at this degree --batch-size 141 fits"),
    "length": ([*MODEL, *PLACE, "--degree", 4, "--max-length", 262145], "takes 1 to 262144 tokens"),
    "not a PNG": ([*MODEL, *PLACE, "--degree", 4, "--plot", "slots.pdf"], "a name that ends in .png"),
    "nowhere to plot": (
        [*MODEL, *PLACE, "--degree", 4, "--plot", "/no/such/folder/a.png"],
        "no folder /no/such/folder",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = REFUSED[case]
    refused(capsys, plan_model, tmp_path, arguments, message)


def test_a_plot_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    refused(capsys, plan_model, tmp_path, [*DENSE, "--plot", tmp_path / "folder.png"], "folder.png is a folder")
    output = call(capsys, plan_model, *DENSE, "--json", "--plot", "/proc/slots.png")
    assert output.status == 2 and "choose another place with --plot" in output.err
    assert json.loads(output.out), "what was computed is printed all the same"


def test_console_script() -> None:
    (script,) = entry_points(group="console_scripts", name="nxdi-qwen-plan")
    assert script.value == "nxdi_qwen.scripts.plan:main"
