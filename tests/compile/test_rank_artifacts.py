"""Artifacts of several ranks: one file each, refused when one is missing or another's; and compiles that are killed."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import chain, count
from pathlib import Path
from types import FrameType

import pytest
import torch
from safetensors.torch import load_file

from nxdi_qwen.compile import cpu
from nxdi_qwen.compile.artifact import file_sha256, open_artifact, weights_file, written_atomically
from nxdi_qwen.compile.cpu import CompileOptions, compile_cpu
from nxdi_qwen.compile.graphs import DECODE, GraphSpec, capture, layer_kind
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.partition import Parallel, take_part
from nxdi_qwen.modeling.state import describe_state
from nxdi_qwen.modeling.weights import collect, random_blocks, weight_cuts
from tests.compile.test_cpu_target import random_source
from tests.modeling.weights.synthetic import make_config

CONFIG = make_config(
    "qwen3_5_moe", num_experts=4, moe_intermediate_size=8, shared_expert_intermediate_size=8, dtype="float32"
)
SOURCE = random_source(CONFIG)
KILLS = 20
# The files that write artifacts: a compile is killed at one of their steps.
WRITING = tuple(f"/{name}.py" for name in ("artifact", "cpu", "manifest", "weights/write", "weights/blocks"))


def compiled(out: Path, degree: int, expert_degree: int = 1) -> Path:
    """An artifact without graphs: they are the same for every rank, and what is tested here are the ranks' files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "graph_specs", lambda *_: [])
        compile_cpu(SOURCE, out, CompileOptions(1, 64, degree=degree, expert_degree=expert_degree))
    return out


@pytest.mark.parametrize(("degree", "expert_degree"), [(1, 1), (2, 1), (4, 2), (4, 4)])
def test_one_file_a_rank(degree: int, expert_degree: int, tmp_path: Path) -> None:
    out = compiled(tmp_path / "out", degree, expert_degree)
    manifest = open_artifact(out, verify=True)
    assert (manifest.degree, manifest.expert_degree) == (degree, expert_degree)
    assert [entry.file for entry in manifest.weights] == [weights_file(rank) for rank in range(degree)]
    assert len({entry.bytes for entry in manifest.weights}) == 1
    whole = dict(collect(random_blocks(CONFIG, torch.float32, 0), CONFIG, torch.float32))
    for rank, entry in enumerate(manifest.weights):
        parallel = Parallel(degree, rank, expert_degree)
        cuts = weight_cuts(CONFIG, parallel)
        tensors = load_file(out / entry.file)
        assert tensors.pop("rank").tolist() == [rank] and tensors.keys() == whole.keys() - {"rank"}
        for name, tensor in tensors.items():
            assert torch.equal(tensor, take_part(whole[name], cuts[name], parallel)), (rank, name)


def test_graphs_and_state_are_a_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = GraphSpec(DECODE, 1, 1, layer_kind(CONFIG, 0))
    monkeypatch.setattr(cpu, "graph_specs", lambda *_: [decode])
    manifest = compile_cpu(SOURCE, tmp_path / "out", CompileOptions(1, 64, degree=4, expert_degree=2))
    # Two key heads of three value heads each over 4 ranks: one key head and two value heads' places a rank.
    assert [(entry["name"].split(".")[2], entry["shape"]) for entry in manifest.state] == [
        ("recurrent", [1, 2, 4, 3]),
        ("conv", [1, 4 + 4 + 6, 3]),
        ("key", [1, 1, 64, 8]),
        ("value", [1, 1, 64, 8]),
    ]
    ranks = [Parallel(4, rank, 2) for rank in (0, 3)]
    state = describe_state(CONFIG, 1, 64, torch.float32, ranks[0])
    first, last = (capture(decode, CONFIG, torch.float32, state, rank).graph_module.code for rank in ranks)
    assert first == last and "all_reduce" in first


def move(source: str, target: str) -> Callable[[Path], object]:
    return lambda at: shutil.copy(at.parent / source, at / target)


FIRST, SECOND, THIRD = (weights_file(rank) for rank in (0, 1, 2))
REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda at: (at / SECOND).unlink(), f"{SECOND} is missing: the artifact is incomplete"),
    "last missing": (lambda at: (at / weights_file(3)).unlink(), f"{weights_file(3)} is missing"),
    "truncated": (lambda at: os.truncate(at / THIRD, 1000), f"{THIRD} is truncated, or of another model or degree"),
    "of another degree": (move(f"two/{SECOND}", SECOND), f"{SECOND} is truncated, or of another model or degree"),
    "of another rank": (
        move(f"four/{SECOND}", FIRST),
        f"{FIRST} holds the weights of rank 1, degree 4, expert_degree 1, not of rank 0, degree 4, expert_degree 1; ",
    ),
    "of another expert degree": (
        move(f"experts/{THIRD}", THIRD),
        f"{THIRD} holds the weights of rank 2, degree 4, expert_degree 4, not of rank 2, degree 4, expert_degree 1; ",
    ),
    "one too many": (move(f"four/{FIRST}", weights_file(4)), f"does not name: {weights_file(4)}; remove"),
}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    for name, degree, expert_degree in (("two", 2, 1), ("four", 4, 1), ("experts", 4, 4)):
        compiled(folder / name, degree, expert_degree)
    return folder


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_with_the_file(case: str, artifacts: Path, tmp_path: Path) -> None:
    damage, message = REFUSALS[case]
    artifact = shutil.copytree(artifacts, tmp_path / "all") / "broken"
    shutil.copytree(artifact.parent / "four", artifact)
    open_artifact(artifact, verify=True)
    damage(artifact)
    with pytest.raises(InputError, match=re.escape(message)) as refusal:
        open_artifact(artifact)
    assert "\n" not in str(refusal.value)


def test_an_edited_rank_is_noticed_on_demand(tmp_path: Path) -> None:
    out = compiled(tmp_path / "out", 2)
    data = bytearray((out / SECOND).read_bytes())
    data[-5] ^= 1
    (out / SECOND).write_bytes(data)
    open_artifact(out)
    with pytest.raises(InputError, match=f"{SECOND} was edited or damaged"):
        open_artifact(out, verify=True)


def test_only_folders_of_the_dead_are_removed(tmp_path: Path) -> None:
    dead, other, alike = (tmp_path / name for name in (".out.partial-dead", ".other.partial-dead", ".out.partial-file"))
    dead.mkdir()
    (dead / "graphs").mkdir()
    other.mkdir()
    alike.write_text("no folder")
    with pytest.raises(InputError, match="came to exist"), written_atomically(tmp_path / "out") as living:
        assert not dead.exists()
        compiled(tmp_path / "out", 2)
        assert living.is_dir()
    open_artifact(tmp_path / "out", verify=True)
    assert sorted(tmp_path.iterdir()) == sorted([other, alike, tmp_path / "out"])


def steps_of(out: Path, last: int | None = None) -> int:
    """Compiles to `out` and counts the steps that the code which writes the artifact takes; dies at step `last`.

    A step is a call, or a return, of Python or of C, within one of its files.
    """
    steps = 0

    def step(frame: FrameType, event: str, argument: object) -> None:
        nonlocal steps
        if frame.f_code.co_filename.endswith(WRITING):
            if steps == last:
                os.kill(os.getpid(), signal.SIGKILL)
            steps += 1

    sys.setprofile(step)
    compiled(out, 4, 2)
    sys.setprofile(None)
    return steps


def was_killed(out: Path, last: int) -> bool:
    """Compiles to `out` in a process that dies at step `last`; False where it was done before."""
    pid = os.fork()
    if not pid:
        try:
            steps_of(out, last)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def what_loads(folder: Path, but: Path) -> list[str]:
    loads = []
    for path in {*folder.rglob("*")} - {but}:
        try:
            open_artifact(path)
            loads.append(path.name)
        except InputError:
            pass
    return loads


def kill_often(folder: Path) -> dict[str, object]:
    """Kills compiles to one destination at random steps, then at each of the last ones, until one is done.

    Tells what they left. For a process of its own, without threads: it forks.
    """
    torch.set_num_threads(1)
    out, dice = folder / "out", random.Random(0)
    steps = steps_of(out)
    shutil.rmtree(out)
    loads, most, left, complete, named = [], 0, set(), 0, 0
    points = chain((dice.randrange(steps) for _ in range(KILLS)), count(steps - 10))
    while was_killed(out, next(points)):
        complete += any(folder.glob(".out.partial-*/manifest.json"))
        loads += what_loads(folder, but=out)
        most = max(most, len(list(folder.iterdir())))
        left.add(tuple(sorted((path.name, file_sha256(path)) for path in folder.rglob("*") if path.is_file())))
        if out.exists():  # it had just got its name
            open_artifact(out, verify=True)
            shutil.rmtree(out)
            named += 1
    open_artifact(out, verify=True)
    names = [path.name for path in folder.iterdir()]
    return {"loads": loads, "most": most, "left": len(left), "complete": complete, "named": named, "names": names}


def test_killed_at_any_point(tmp_path: Path) -> None:
    code = "import json, pathlib, sys; from tests.compile.test_rank_artifacts import kill_often; "
    code += "print(json.dumps(kill_often(pathlib.Path(sys.argv[1]))))"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["loads"] == []
    assert told["most"] <= 1, "each compile removes what the one before it left"
    assert told["left"] > KILLS / 2, "the kills came at different points"
    assert told["complete"] and told["named"], "some had everything but the name, some died just after they got it"
    assert told["names"] == ["out"]
