"""What `nxdi-qwen-serve` says when it cannot start, and with options that it changes."""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path

import pytest

from tests.serving import stored
from tests.serving.server import Server
from tests.serving.stored import FAMILIES, LLAMA, MAX_LENGTH, SLOTS

pytestmark = pytest.mark.vllm

NAME = FAMILIES[0]


def said(model: Path, log: Path, *options: object) -> str:
    """What it says before it leaves with a failure."""
    server = Server(model, log, options)
    try:
        return server.failed()
    finally:
        server.stop()


@pytest.mark.parametrize("name", [NAME, LLAMA])
def test_a_checkpoint_is_no_artifact(log: Path, name: str) -> None:
    (line,) = said(stored.checkpoint(name), log).splitlines()
    assert line.startswith("error: ") and "manifest.json" in line


def test_a_damaged_artifact(log: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(stored.artifact(NAME), tmp_path / "copy")
    (copy / "config.json").unlink()
    (line,) = said(copy, log).splitlines()
    assert line.startswith("error: ") and "config.json" in line


# Each with both numbers and both mends.
BEYOND: dict[tuple[object, ...], str] = {
    ("--max-num-seqs", SLOTS + 1): rf"{SLOTS + 1} requests .* holds {SLOTS}: .*--max-num-seqs {SLOTS}.*--batch-size",
    ("--max-model-len", MAX_LENGTH + 1): rf"{MAX_LENGTH + 1} tokens .* {MAX_LENGTH}: .*--max-model-len .*--max-length",
    ("--tensor-parallel-size", 2): r"--tensor-parallel-size is 2 .* 1 process.*--tensor-parallel-size 1.*--degree",
}


def test_more_than_the_artifact_holds(tmp_path: Path) -> None:
    """The reason is the last line, behind vLLM's own."""
    with contextlib.ExitStack() as stack:
        servers = [Server(stored.artifact(NAME), tmp_path / f"{place}.log", opt) for place, opt in enumerate(BEYOND)]
        for server in servers:
            stack.callback(server.stop)
        for server, message in zip(servers, BEYOND.values(), strict=True):
            output = server.failed()
            assert re.search(message, output.strip().splitlines()[-1]), output[-2000:]
