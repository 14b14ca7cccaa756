"""What the processes of `worker` computed: started once per test session, and never waited for without an end."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from filelock import FileLock
from torch import Tensor

from nxdi_qwen.modeling.partition import SINGLE
from tests.hf_fixtures import COMMON, FIXTURES, Spec, model_of, save_checkpoint
from tests.parallel.faults import FAULTS, Case
from tests.parallel.seam_checks import CHECKS
from tests.parallel.worker import MAX_LENGTH, SLOTS, Runner, run_stage

ROOT = Path(__file__).parents[2]
DEGREES = (2, 4)
# Seconds for all stages of one launch; beyond them every process is killed.
TIMEOUT = 300
# Forked, so that torch (and what export brings in) is imported once.
ENTRY = """
import sys
from pathlib import Path
import torch._dynamo
from torch.multiprocessing import start_processes
from tests.parallel.worker import main
start_processes(main, args=(Path(sys.argv[1]),), nprocs=int(sys.argv[2]), start_method="fork")
"""


def _short(name: str, **changes: Any) -> Spec:
    """The fixture with one layer of each kind, and other changes."""
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    return Spec(FIXTURES[name].family, FIXTURES[name].config | layers | changes)


# At degree 4 all but `four_groups` are above their KV heads and their key heads.
SPECS = {
    "qwen3_next": _short("qwen3_next"),
    # Three value heads to two ranks, another conv kernel, a tied head, dense layers among MoE.
    "qwen3_next_mixed": Spec(
        "qwen3_next",
        FIXTURES["qwen3_next_mixed"].config
        | {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "mlp_only_layers": [],
        },
    ),
    # Three value heads and three query heads to two ranks.
    "qwen3_5": FIXTURES["qwen3_5"],
    "qwen3_5_tied": _short("qwen3_5_tied"),
    "qwen3_5_bias": _short("qwen3_5_bias"),
    "qwen3_5_moe": _short("qwen3_5_moe"),
    # Above the heads at degree 2 as well; at degree 4 the last rank owns no query head and no value head.
    "one_group": _short(
        "qwen3_5", num_key_value_heads=1, num_attention_heads=3, linear_num_key_heads=1, linear_num_value_heads=3
    ),
    # Several groups to a rank.
    "four_groups": _short(
        "qwen3_next",
        num_key_value_heads=4,
        num_attention_heads=8,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
    ),
}
EXPERT_CASES = {
    2: [("qwen3_5_moe", 2), ("four_groups", 2)],
    4: [("qwen3_5_moe", 2), ("qwen3_5_moe", 4), ("four_groups", 4)],
}
CASES = {
    degree: [Case(name) for name in SPECS] + [Case(name, expert_degree) for name, expert_degree in EXPERT_CASES[degree]]
    for degree in DEGREES
}
# Zero-filled ranks; a rank without heads; several groups to a rank.
MOVES = ("qwen3_next_mixed", "one_group", "four_groups")
MOVE_DEGREES = (1, *DEGREES)
EXPORTED = Case("qwen3_5_moe", 2)

Task = tuple[Any, ...]


def _arrivals() -> list[Task]:
    return [("arrive", Case(name), degree) for name in MOVES for degree in MOVE_DEGREES]


def _tasks(degree: int) -> list[Task]:
    tasks: list[Task] = [("leave", Case(name)) for name in MOVES]
    tasks += [("parity", case) for case in CASES[degree]]
    tasks += [("faulty", name) for name, fault in FAULTS.items() if fault.degree == degree]
    tasks += [("seam", check) for check in CHECKS]
    return tasks


# States move both ways, so the first degree runs again when the second has written its own.
STAGES = [(2, [*_tasks(2), ("exported", EXPORTED)]), (4, [*_tasks(4), *_arrivals()]), (2, _arrivals())]


class Results(NamedTuple):
    """`ranks[degree][rank]` and `single` are the tasks' results; `expected[name]` [SLOTS, MAX_LENGTH, V] is what
    Hugging Face says for each prompt.
    """

    folder: Path
    ranks: dict[int, list[dict[Task, Any]]]
    single: dict[Task, Any]
    expected: dict[str, Tensor]


def results(factory: pytest.TempPathFactory) -> Results:
    """Of all stages; other test processes of the session read what the first one wrote."""
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    return _results(shared / "parallel")


@functools.cache
def _results(folder: Path) -> Results:
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "done.pt").exists():
            folder.mkdir(exist_ok=True)
            try:
                _run(folder)
            except Exception as error:  # the other test processes must not try the same again
                torch.save(f"{type(error).__name__}: {error}", folder / "done.pt")
    done = torch.load(folder / "done.pt", weights_only=False)
    if isinstance(done, str):
        raise RuntimeError(done)
    return done


@torch.no_grad()
def _run(folder: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    models = {name: model_of(spec) for name, spec in SPECS.items()}
    for name, model in models.items():
        save_checkpoint(model, folder / name)
        prompts = torch.randint(0, COMMON["vocab_size"], (SLOTS, MAX_LENGTH), generator=generator)
        torch.save(prompts, folder / name / "prompts.pt")
    single = run_stage(Runner(folder, SINGLE), [("leave", Case(name)) for name in MOVES])
    torch.save({"stages": STAGES, "timeout": TIMEOUT}, folder / "job.pt")
    with started(ENTRY, str(folder), str(max(DEGREES))) as processes:
        # Rows of one length and no cache: the plainest form. It runs while the processes start.
        expected = {
            name: model(input_ids=torch.load(folder / name / "prompts.pt"), use_cache=False).logits
            for name, model in models.items()
        }
        single |= run_stage(Runner(folder, SINGLE), [("parity", Case(name)) for name in SPECS])
        finish(processes, TIMEOUT)
    single |= run_stage(Runner(folder, SINGLE), _arrivals())
    ranks: dict[int, list[dict[Task, Any]]] = {degree: [{} for _ in range(degree)] for degree in DEGREES}
    for number, (degree, _) in enumerate(STAGES):
        for rank in range(degree):
            ranks[degree][rank] |= torch.load(folder / f"{number}-{rank}.pt", weights_only=False)
    torch.save(Results(folder, ranks, single, expected), folder / "done.pt")


@contextlib.contextmanager
def started(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python script in a process group of its own, one thread to a process; at the end the whole group is killed."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=said,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        except RuntimeError as error:
            said.seek(0)
            raise RuntimeError(f"{error}\n{said.read()[-4000:]}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def finish(process: subprocess.Popen[str], timeout: float) -> None:
    """Waits for the end of `process`. Raises RuntimeError if it fails or `timeout` seconds have passed."""
    try:
        status = process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no end after {timeout} s") from None
    if status:
        raise RuntimeError(f"a process failed with status {status}")
