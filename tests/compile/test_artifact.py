"""The artifact folder: whole or not at all; anything stale, foreign, truncated or edited is refused with the reason."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nxdi_qwen.compile import cpu
from nxdi_qwen.compile.artifact import open_artifact, written_atomically
from nxdi_qwen.compile.cpu import CompileOptions, compile_cpu
from nxdi_qwen.compile.graphs import HEAD, HEAD_ROWS, GraphSpec
from nxdi_qwen.compile.manifest import FORMAT_VERSION, Manifest
from nxdi_qwen.compile.source import ModelSource
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.weights import Block, random_blocks
from tests.artifacts import MAX_LENGTH, SLOTS, artifact_of, checkpoint_of
from tests.modeling.weights.synthetic import make_config

WEIGHTS = "weights/tp0_sharded_checkpoint.safetensors"
GRAPH = "graphs/context_64.full_attention_dense.pt2"


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Every path below `folder` with its size and time of change."""
    return {str(p.relative_to(folder)): (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*")}


def edited_manifest(folder: Path, **changes: object) -> None:
    """Changes entries of the manifest and makes its hash right again: another version's manifest, not a damaged one."""
    content = json.loads((folder / "manifest.json").read_text())
    del content["manifest_sha256"]
    content |= changes
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["manifest_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(content))


def changed_byte(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifact_of(tmp_path_factory, "qwen3_5")


@pytest.fixture
def artifact(original: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(original, tmp_path / "artifact"))


def test_round_trip(original: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    manifest = open_artifact(original, verify=True)
    source = ModelSource.from_checkpoint(checkpoint_of(tmp_path_factory, "qwen3_5"))
    assert manifest.model == source.config and manifest.generation == source.generation
    assert manifest.source == {"name": source.name, "fingerprint": source.fingerprint}
    assert (manifest.slots, manifest.max_length, manifest.buckets, manifest.degree) == (SLOTS, MAX_LENGTH, (64,), 1)
    assert (manifest.target, manifest.optimized, manifest.dtype) == ("cpu", False, "float32")
    parts = ("embed", "linear_attention_dense", "full_attention_dense", "logits")
    assert list(manifest.graphs) == [
        *(f"context_64.{part}" for part in parts),
        "continuation_64.full_attention_dense",
        *(f"decode.{part}" for part in parts),
        "head",
    ]
    assert set(manifest.checkpoint_files) == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert [entry["name"] for entry in manifest.state] == [
        f"layers.{layer}.{role}" for layer, role in [(0, "recurrent"), (0, "conv"), (1, "key"), (1, "value")]
    ]
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest
    assert (tmp_path / "manifest.json").read_bytes() == (original / "manifest.json").read_bytes()


def test_a_moved_artifact_loads(artifact: Path, tmp_path: Path) -> None:
    open_artifact(artifact.rename(tmp_path / "elsewhere"), verify=True)


def swap_key_and_value_weights(folder: Path) -> None:
    """A file of the same size whose header places two tensors differently."""
    path = folder / WEIGHTS
    data = path.read_bytes()
    for old, new in (
        (b"attn.k_proj", b"attn.?_proj"),
        (b"attn.v_proj", b"attn.k_proj"),
        (b"attn.?_proj", b"attn.v_proj"),
    ):
        data = data.replace(b"self_" + old, b"self_" + new)
    assert data != path.read_bytes() and len(data) == path.stat().st_size
    path.write_bytes(data)


def replaced(old: str, new: str) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        text = (folder / "manifest.json").read_text()
        assert old in text
        (folder / "manifest.json").write_text(text.replace(old, new))

    return damage


def write_text(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "no artifact at .*: compile one with neuron-compile --out "),
    "half-written": (lambda at: (at / "manifest.json").unlink(), "no complete artifact: it has no manifest.json"),
    "manifest edited": (replaced('"slots": 3', '"slots": 4'), "manifest.json was edited or damaged"),
    "manifest without its hash": (replaced("manifest_sha256", "sum"), "manifest.json was edited or damaged"),
    "manifest truncated": (replaced('"\n}\n', ""), "it is not JSON"),
    "manifest of bytes": (lambda at: (at / "manifest.json").write_bytes(b"\xff\xfe\x00"), "it is not JSON"),
    "manifest a list": (write_text("manifest.json", "[]"), "does not describe an nxdi-qwen artifact"),
    "foreign manifest": (write_text("manifest.json", '{"format": "other"}'), "does not describe an nxdi-qwen artifact"),
    "other format version": (
        lambda at: edited_manifest(at, format_version=FORMAT_VERSION + 1),
        f"has format version {FORMAT_VERSION + 1}, this program reads {FORMAT_VERSION}",
    ),
    "other torch": (
        lambda at: edited_manifest(at, libraries={"torch": "2.0.0", "nxdi-qwen": "0.1.0"}),
        "was compiled with torch 2.0.0, here is " + re.escape(torch.__version__),
    ),
    "other version of this package": (
        lambda at: edited_manifest(at, libraries={"torch": torch.__version__, "nxdi-qwen": "0.0.1"}),
        "was compiled with nxdi-qwen 0.0.1, here is ",
    ),
    "compiled code of another machine": (
        lambda at: edited_manifest(at, optimized=True, machine="abacus WOOD"),
        "was compiled for abacus WOOD, this machine is ",
    ),
    "compiled code of another processor": (
        lambda at: edited_manifest(at, optimized=True, instruction_sets=["avx9_beads", "avx9_frame"]),
        "was compiled on a processor with avx9_beads, avx9_frame, which this one lacks; compile it again here",
    ),
    "graph edited": (lambda at: changed_byte(at / GRAPH, 1000), f"{GRAPH} was edited or damaged"),
    "graph truncated": (lambda at: (at / GRAPH).write_bytes((at / GRAPH).read_bytes()[:-1]), f"{GRAPH} was edited"),
    "graph missing": (lambda at: (at / GRAPH).unlink(), f"{GRAPH} is missing: the artifact is incomplete"),
    "graph a folder": (lambda at: [(at / GRAPH).unlink(), (at / GRAPH).mkdir()], f"{GRAPH} is missing"),
    "tokenizer edited": (
        lambda at: changed_byte(at / "tokenizer_config.json", 20),
        "tokenizer_config.json was edited or damaged",
    ),
    "tokenizer missing": (lambda at: (at / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "weights missing": (lambda at: (at / WEIGHTS).unlink(), f"{WEIGHTS} is missing"),
    "weights truncated": (
        lambda at: (at / WEIGHTS).write_bytes((at / WEIGHTS).read_bytes()[:-4]),
        f"{WEIGHTS} is truncated, or of another model or degree: ",
    ),
    "weights of another model": (swap_key_and_value_weights, f"{WEIGHTS} holds the weights of another model"),
    "weights' header damaged": (lambda at: changed_byte(at / WEIGHTS, 9), f"{WEIGHTS}"),
    "stranger": (
        write_text("graphs/context_128.embed.pt2", "?"),
        "does not name: graphs/context_128.embed.pt2",
    ),
    "stranger above": (write_text("notes.txt", "?"), "does not name: notes.txt; remove"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_with_the_reason(case: str, artifact: Path) -> None:
    damage, message = REFUSALS[case]
    damage(artifact)
    before = listing(artifact.parent)
    with pytest.raises(InputError, match=message) as refusal:
        open_artifact(artifact)
    assert "\n" not in str(refusal.value)
    assert listing(artifact.parent) == before


def test_an_exported_program_is_bound_to_no_machine(artifact: Path) -> None:
    edited_manifest(artifact, machine="abacus WOOD", instruction_sets=["avx9_beads"])
    open_artifact(artifact)


def test_edited_weights_are_noticed_on_demand(artifact: Path) -> None:
    changed_byte(artifact / WEIGHTS, -5)
    open_artifact(artifact)
    with pytest.raises(InputError, match=f"{WEIGHTS} was edited or damaged"):
        open_artifact(artifact, verify=True)


CONFIG = make_config("qwen3_5")


def source_of(blocks: Callable[[torch.dtype], Iterator[Block]]) -> ModelSource:
    """A source that hands out `blocks`; it costs no checkpoint."""
    defaults = ModelSource.from_preset("qwen3.5-0.8b")
    values: dict[str, Any] = vars(defaults) | {"config": CONFIG, "name": "tiny", "blocks": blocks}
    return ModelSource(**values)


def intact(dtype: torch.dtype) -> Iterator[Block]:
    return random_blocks(CONFIG, dtype, seed=0)


def interrupted(error: BaseException) -> Callable[[torch.dtype], Iterator[Block]]:
    """Some blocks, then the error."""

    def blocks(dtype: torch.dtype) -> Iterator[Block]:
        for count, item in enumerate(intact(dtype)):
            if count == 4:
                raise error
            yield item

    return blocks


OPTIONS = CompileOptions(slots=1, max_length=64)


@pytest.fixture
def head_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small graph: what is tested here comes after the graphs."""
    monkeypatch.setattr(cpu, "graph_specs", lambda *_: [GraphSpec(HEAD, HEAD_ROWS, 1)])


@pytest.mark.usefixtures("head_only")
@pytest.mark.parametrize("error", [RuntimeError("disk"), KeyboardInterrupt(), InputError("late")], ids=repr)
@pytest.mark.parametrize("out", ["out", "new/deep/out"])
def test_a_failing_compile_leaves_no_trace(error: BaseException, out: str, tmp_path: Path) -> None:
    with pytest.raises(type(error)):
        compile_cpu(source_of(interrupted(error)), tmp_path / out, OPTIONS)
    assert listing(tmp_path) == {}
    compile_cpu(source_of(intact), tmp_path / out, OPTIONS)
    open_artifact(tmp_path / out, verify=True)
    assert [path.name for path in (tmp_path / out).parent.iterdir()] == ["out"]


@pytest.mark.usefixtures("head_only")
def test_a_failing_compile_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "parent" / "out").mkdir(parents=True)
    (tmp_path / "parent" / "neighbour").write_text("stays")
    before = sorted(listing(tmp_path))
    with pytest.raises(RuntimeError):
        compile_cpu(source_of(interrupted(RuntimeError())), tmp_path / "parent" / "out", OPTIONS)
    assert sorted(listing(tmp_path)) == before
    compile_cpu(source_of(intact), tmp_path / "parent" / "out", OPTIONS)  # an empty folder may be filled
    open_artifact(tmp_path / "parent" / "out")


@pytest.mark.parametrize("content", ["file", "folder"])
def test_an_existing_destination_is_never_touched(content: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if content == "file":
        out.write_text("mine")
    else:
        (out / "mine").mkdir(parents=True)
    before = listing(tmp_path)
    with pytest.raises(InputError, match="exists: remove it, or choose another folder with --out"):
        compile_cpu(source_of(interrupted(AssertionError("too late"))), out, OPTIONS)
    assert listing(tmp_path) == before


def test_a_destination_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="file is not a folder: choose another place with --out"):
        compile_cpu(source_of(intact), tmp_path / "file" / "out", OPTIONS)


def test_a_destination_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(InputError, match=r"cannot write .*: choose another place with --out"):
        compile_cpu(source_of(intact), Path("/proc/nowhere/out"), OPTIONS)


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(InputError, match=r"not written .*No space left"), written_atomically(tmp_path / "a" / "out"):
        raise full
    assert list(tmp_path.iterdir()) == []


def test_two_compiles_into_one_place_do_not_mix(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="came to exist"), written_atomically(tmp_path / "out") as late:
        (late / "who").write_text("late")
        with written_atomically(tmp_path / "out") as early:
            (early / "who").write_text("early")
    assert (tmp_path / "out" / "who").read_text() == "early"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.compile import test_artifact as t

t.cpu.graph_specs = lambda *_: [t.GraphSpec(t.HEAD, t.HEAD_ROWS, 1)]

def blocks(dtype):
    for count, item in enumerate(t.intact(dtype)):
        if count == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        yield item

t.compile_cpu(t.source_of(blocks), Path(sys.argv[1]), t.OPTIONS)
"""


@pytest.mark.usefixtures("head_only")
def test_a_killed_compile_leaves_nothing_that_loads_or_blocks(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", KILLED, str(tmp_path / "out")]
    assert subprocess.run(command, cwd=root, check=False).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.partial-") and (left / "graphs" / "head.pt2").is_file()
    with pytest.raises(InputError, match="no complete artifact"):
        open_artifact(left)
    compile_cpu(source_of(intact), tmp_path / "out", OPTIONS)
    open_artifact(tmp_path / "out", verify=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_link_leads_to_the_artifact(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("place")
    with written_atomically(tmp_path / "link") as folder:
        (folder / "file").touch()
    assert (tmp_path / "place" / "file").is_file() and (tmp_path / "link").is_symlink()


def test_places_that_cannot_be_exchanged_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for out, what in ((Path("."), "the current folder"), (Path("/proc"), "a mount point")):
        with pytest.raises(InputError, match=f"is {what}, which cannot be exchanged"), written_atomically(out):
            pass


def test_others_may_read_what_the_user_lets_them(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with written_atomically(tmp_path / "out"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize(
    ("file", "message"), [("neuron_config.json", "of the target neuron"), ("report.json", "of the target hlo")]
)
def test_other_targets_are_told_apart(tmp_path: Path, file: str, message: str) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(InputError, match=message):
        open_artifact(tmp_path)
