"""Running the command lines within the test process, and what every refusal must look like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from nxdi_qwen.scripts import command

Main = Callable[[list[str] | None], int]


class Output(NamedTuple):
    status: int
    out: str
    err: str


def call(capsys: pytest.CaptureFixture[str], main: Main, *arguments: object) -> Output:
    """Runs a command as its console script does."""
    capsys.readouterr()
    try:
        status = command.run(main, [str(argument) for argument in arguments])
    except SystemExit as left:  # argparse
        assert isinstance(left.code, int)
        status = left.code
    return Output(status, *capsys.readouterr())


def refused(
    capsys: pytest.CaptureFixture[str], main: Main, folder: Path, arguments: Sequence[object], message: str
) -> None:
    """Asserts status 2, one line that says `message` on standard error beside notes, nothing written below `folder`."""
    before = listing(folder)
    output = call(capsys, main, *arguments)
    assert output.status == 2, output
    assert output.out == ""
    (error,) = (line for line in output.err.splitlines() if not line.startswith("note: "))
    assert error.startswith("error: ") and message in error, error
    assert listing(folder) == before


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Every path below `folder` with its size and time of change."""
    return {str(p.relative_to(folder)): (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*")}
