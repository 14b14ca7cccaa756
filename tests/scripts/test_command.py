"""What becomes of a command's end: one line for files that cannot be used, quiet for an interruption."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command_line import call


def raises(error: BaseException) -> Callable[[list[str] | None], int]:
    def main(_: list[str] | None) -> int:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (
            PermissionError(13, "Permission denied", "a/graphs/one.pt2"),
            2,
            "error: a/graphs/one.pt2: Permission denied\n",
        ),
        (OSError(28, "No space left on device"), 2, "error: No space left on device\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors(capsys: pytest.CaptureFixture[str], error: BaseException, status: int, message: str) -> None:
    assert call(capsys, raises(error)) == (status, "", message)


PROGRAM = """
import sys
from nxdi_qwen.scripts import command
raise SystemExit(command.run(lambda _: print("\\ufffd" * 100000) or 0))
"""


@pytest.mark.parametrize(("reader", "status"), [("head -c 1", 141), ("cat", 0)])
def test_a_reader_that_goes_away(tmp_path: Path, reader: str, status: int) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    script = f"PYTHONIOENCODING=ascii {sys.executable} program.py | {reader} > out; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"{status}\n", "")


def test_a_full_disk_behind_the_output(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, tmp_path / "program.py"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "error: No space left on device")
