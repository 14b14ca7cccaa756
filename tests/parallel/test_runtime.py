"""An artifact of degree 2 on two processes, as a user starts them: the same tokens and logits as with one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nxdi_qwen.scripts.generate import generate
from nxdi_qwen.scripts.logit_diff import logit_diff
from tests.artifacts import artifact_of, checkpoint_of
from tests.command_line import call, refused

NAME = "qwen3_5"
# Three slots: the last prompts wait in the queue. The second one runs in pieces.
PROMPTS = [
    *("--ids", "1,2,3", "--ids", ",".join(map(str, range(100))), "--ids", "7", "--ids", "9,8", "--prompt", "Hello"),
    *("--max-new-tokens", "6", "--temperature", "0", "--ignore-eos", "--json"),
]


def on_ranks(ranks: int, module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A command under torchrun."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launch, "-m", f"nxdi_qwen.scripts.{module}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifact_of(tmp_path_factory, NAME, degree=2)


@pytest.mark.slow
def test_generate(artifact: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]) -> None:
    alone = json.loads(call(capsys, generate, "--artifacts", artifact_of(tmp_path_factory, NAME), *PROMPTS).out)
    both = on_ranks(2, "generate", "--artifacts", artifact, *PROMPTS)
    assert both.returncode == 0, both.stderr
    lines = both.stdout.splitlines()
    assert len(lines) == 1  # rank 1 prints nothing
    assert _ids(json.loads(lines[0])) == _ids(alone)


@pytest.mark.slow
def test_logit_diff(artifact: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    compared = [
        "--model",
        checkpoint_of(tmp_path_factory, NAME),
        "--artifacts",
        artifact,
        "--prompts",
        "repeated,special",
    ]
    done = on_ranks(2, "logit_diff", *compared, "--cache", tmp_path, "--json", "--tolerance", 1e-5)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["passed"]


def test_a_destroyed_process_group_leaves_no_threads(tmp_path: Path) -> None:
    """Threads of gloo that are still there when Python ends make some processes abort."""
    program = f"""
from pathlib import Path
import torch
from torch import distributed
from nxdi_qwen.modeling import parallel
distributed.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
torch.ops.nxdi_qwen.all_reduce(torch.ones(3))
distributed.destroy_process_group()
names = [task.read_text() for task in Path("/proc/self/task").glob("*/comm")]
assert not [name for name in names if "gloo" in name], names
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_number_of_processes_must_be_the_degree(
    artifact: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    message = "has degree 2 and needs as many processes, not 1: start it with torchrun --nproc-per-node 2"
    refused(capsys, generate, tmp_path, ["--artifacts", artifact, "--ids", "1"], message)
    model = checkpoint_of(tmp_path_factory, NAME)
    refused(capsys, logit_diff, tmp_path, ["--model", model, "--artifacts", artifact], message)


@pytest.mark.slow
def test_too_many_processes_end_at_once(artifact: Path) -> None:
    done = on_ranks(3, "generate", "--artifacts", artifact, "--ids", "1")
    assert done.returncode != 0
    assert "has degree 2 and needs as many processes, not 3" in done.stderr


def _ids(report: dict[str, Any]) -> list[list[int]]:
    return [completion["token_ids"] for completion in report["completions"]]
