"""The real NxDI in its CPU mode on 1, 2 and 4 ranks, through torchrun and gloo, beside Hugging Face."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from torch import Tensor

from tests.nxdi.calls import check
from tests.nxdi.cpu_worker import ALONE_LENGTHS, ALONE_STEPS, BROKEN, NAMES, SAMPLED, Result
from tests.nxdi.references import DECODE_STEPS, GREEDY_STEPS, RAGGED_LENGTHS, reference

pytestmark = pytest.mark.nxdi

ROOT = Path(__file__).parents[2]
DEGREES = (1, 2, 4)
TIMEOUT = 600  # seconds for all ranks of a degree, most of them for imports where cores are few

Ranks = list[dict[str, Result]]
OfDegree = Callable[[int], Ranks]


@pytest.fixture(scope="session")
def of_degree(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], Path]) -> OfDegree:
    """What each rank of a degree computed; other test processes of the session read what the first one started."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    @functools.cache
    def results(degree: int) -> Ranks:
        folder = shared / f"degree-{degree}"
        with FileLock(folder.with_suffix(".lock")):
            if not folder.exists():
                folder.mkdir()
                for name in NAMES:
                    (folder / name).symlink_to(checkpoint(name), target_is_directory=True)
                launch(degree, folder)
        status = (folder / "status").read_text()
        if status != "0":
            raise RuntimeError(f"degree {degree}: exit status {status}\n{(folder / 'log').read_text()[-6000:]}")
        ranks = [torch.load(folder / f"{degree}-{rank}.pt") for rank in range(degree)]
        return [{name: Result(**result) for name, result in rank.items()} for rank in ranks]

    return results


def launch(degree: int, folder: Path) -> None:
    """Runs all ranks; what they write goes to `FOLDER/log`, torchrun's exit status to `FOLDER/status`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={degree}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "-m", "tests.nxdi.cpu_worker", str(folder)], cwd=ROOT, env=environment, stdout=log, stderr=log
        )
        try:
            status = str(process.wait(TIMEOUT))
        except subprocess.TimeoutExpired:
            status = f"none after {TIMEOUT} s"
            process.terminate()  # torchrun ends its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
    (folder / "status").write_text(status)


def shapes(logits: dict[int, Tensor]) -> list[int]:
    return [len(rows) for rows in logits.values()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("degree", DEGREES)
def test_rows_that_come_one_by_one(of_degree: OfDegree, degree: int, name: str) -> None:
    logits = of_degree(degree)[0][name].alone
    assert shapes(logits) == [1 + ALONE_STEPS] * len(ALONE_LENGTHS)
    check(logits, {slot: reference(name).prompts[length] for slot, length in enumerate(ALONE_LENGTHS)})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("degree", DEGREES)
def test_a_ragged_batch(of_degree: OfDegree, degree: int, name: str) -> None:
    logits = of_degree(degree)[0][name].ragged
    assert shapes(logits) == [1 + DECODE_STEPS] * len(RAGGED_LENGTHS)
    check(logits, dict(enumerate(reference(name).ragged)))


@pytest.mark.parametrize("degree", DEGREES)
def test_ranks_agree_bit_by_bit(of_degree: OfDegree, degree: int) -> None:
    first, *others = of_degree(degree)
    for other in others:
        for name in NAMES:
            for mine, its in ((first[name].alone, other[name].alone), (first[name].ragged, other[name].ragged)):
                assert all(torch.equal(mine[slot], its[slot]) for slot in mine)


@pytest.mark.parametrize("degree", DEGREES)
def test_every_parameter_of_every_rank_is_loaded(of_degree: OfDegree, degree: int) -> None:
    for rank in of_degree(degree):
        assert {name: result.unloaded for name, result in rank.items()} == {name: [] for name in NAMES}


@pytest.mark.parametrize("degree", DEGREES)
def test_greedy_sampling_on_the_device_takes_the_largest_logit(of_degree: OfDegree, degree: int) -> None:
    for rank in of_degree(degree):
        assert rank[SAMPLED].sampled is not None
        tokens, best = rank[SAMPLED].sampled
        assert tokens.shape == (GREEDY_STEPS, len(RAGGED_LENGTHS))
        assert torch.equal(tokens, best)
        assert len(tokens.unique()) > GREEDY_STEPS  # not the same one over and over


@pytest.mark.parametrize("degree", DEGREES)
def test_control_one_weight_of_one_rank_is_off_by_a_hundredth(of_degree: OfDegree, degree: int) -> None:
    logits = of_degree(degree)[0][BROKEN].broken
    assert logits is not None
    with pytest.raises(AssertionError, match="relative errors"):
        check(logits, dict(enumerate(reference(BROKEN).ragged)))
