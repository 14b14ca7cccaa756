"""A port's own tests call the comparison in three lines: as a function, and as a fixture of the pytest plugin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nxdi_qwen.parity import assert_parity
from tests.artifacts import checkpoint_of

TESTS = """
from pathlib import Path
import torch
from nxdi_qwen.modeling.layers.norm import ZeroCenteredRMSNorm

OPTIONS = {"prompts": "repeated", "cache": Path(r"CACHE")}

def test_right(assert_parity):
    assert_parity(r"MODEL", tolerance=1e-5, **OPTIONS)

def test_wrong(assert_parity, monkeypatch):
    monkeypatch.setattr(ZeroCenteredRMSNorm, "forward", lambda self, x: x)
    assert_parity(r"MODEL", target="eager:float32", **OPTIONS)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of(tmp_path_factory, "qwen3_5")


def test_the_function(checkpoint: Path, tmp_path: Path) -> None:
    outcome = assert_parity(checkpoint, prompts="repeated", cache=tmp_path)
    assert outcome.passed and [result.prompt for result in outcome.prompts] == ["100 repeated", "100 alternating"]
    with pytest.raises(AssertionError, match=r"eager is not huggingface\nFAILED: 2 of 2 prompts\n.*two-way, prefill"):
        assert_parity(checkpoint, prompts="repeated", cache=tmp_path, tolerance=1e-12)


def test_the_plugin(checkpoint: Path, tmp_path: Path) -> None:
    """In a process of its own, as a port has it: found by itself, with nothing imported before it is used."""
    file = tmp_path / "test_port.py"
    file.write_text(TESTS.replace("CACHE", str(tmp_path / "cache")).replace("MODEL", str(checkpoint)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, file]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    lines = done.stdout[done.stdout.index("= parity =") :]
    assert "test_right: eager: passed 2 prompts, max_rel" in lines
    assert "test_wrong: eager:float32: FAILED: 2 of 2 prompts" in lines
    assert "parts in layer 0" in done.stdout


def test_starting_pytest_imports_no_torch(tmp_path: Path) -> None:
    program = "import sys, nxdi_qwen.parity.pytest_plugin; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)
