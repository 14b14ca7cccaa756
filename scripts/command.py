"""What all command lines share: one-line errors with exit status 2, progress bars, common options."""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from nxdi_qwen.modeling.errors import InputError

BAD_INPUT = 2
# As shells have them: 128 and the number of the signal.
INTERRUPTED = 130
BROKEN_PIPE = 141
PROGRAM_ERROR = 70  # EX_SOFTWARE of sysexits.h


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        print(f"error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(BAD_INPUT)


def run(main: Callable[[list[str] | None], int], arguments: list[str] | None = None) -> int:
    """Runs a command; bad input, and a file that cannot be read or written, become one line on standard error and
    status 2. An interruption ends quietly, and so does a reader of the output that goes away. A fault of the program
    itself is status 70.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # models write characters that a terminal may not have
    try:
        status = main(arguments)
        sys.stdout.flush()
    except InputError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes once more when it ends, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
        return BAD_INPUT
    except Exception:
        # Not Python's own status, 1: that is a verdict of some commands.
        traceback.print_exc()
        return PROGRAM_ERROR
    return status


def integers(text: str) -> tuple[int, ...]:
    """A comma-separated list of whole numbers, for argparse."""
    try:
        return tuple(int(part) for part in text.split(",")) if text.strip() else ()
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of whole numbers") from None


def check_file(path: Path, option: str) -> None:
    """Before anything is computed: raises InputError where `option` names no place for a file."""
    if path.is_dir():
        raise InputError(f"{option}: {path} is a folder: give the name of a file")
    if not path.absolute().parent.is_dir():
        raise InputError(f"{option}: no folder {path.parent}: make it first")


def write_file(path: Path, text: str, option: str) -> None:
    """Raises InputError where the file that `option` names cannot be written."""
    try:
        path.write_text(text)
    except OSError as error:
        raise InputError(f"cannot write {path} ({error.strerror}): choose another place with {option}") from error


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """A `progress(stage, done, total)` that draws one bar a stage on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bars = Progress(*columns, console=Console(stderr=True))
    tasks: dict[str, TaskID] = {}

    def report(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            bars.start()  # not before there is something to show: rich ends even an empty display with a line break
            tasks[stage] = bars.add_task(stage, total=total)
        bars.update(tasks[stage], completed=done, total=total)

    try:
        yield report
    finally:
        if tasks:
            bars.stop()
