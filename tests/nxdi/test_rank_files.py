"""One file a rank for NxDI: NxD's own cutting gives the same bits, its loading takes them, and memory stays small."""

from __future__ import annotations

import functools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nxdi_qwen.compile.hardware_facts import peak_rss_bytes
from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.nxdi.weights import rank_file, write_nxdi_ranks
from nxdi_qwen.modeling.weights import Block, Checkpoint, checkpoint_blocks, collect, plan_weights, random_blocks
from tests.measure_conversion import make_checkpoint, model_of
from tests.modeling.weights.synthetic import make_config
from tests.nxdi.references import NAMES, write_checkpoint

MakeCheckpoint = Callable[[str], Path]
# Two key heads of three value heads each, one KV head of two query heads: 4 ranks replicate and fill up.
CONFIG = make_config(
    "qwen3_next", num_experts=4, moe_intermediate_size=8, shared_expert_intermediate_size=8, attention_bias=True
)
BFLOAT16 = torch.bfloat16


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and ours[name].shape == tensor.shape, name
        same = torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8))
        assert same, name  # not the comparison: a failure would print both tensors


def files(folder: Path) -> list[dict[str, Tensor]]:
    """What each rank's file holds; there must be no other files."""
    ranks = [load_file(folder / rank_file(rank)) for rank in range(len(list(folder.iterdir())))]
    assert ranks
    return ranks


# --- Against NxD


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """The folder of a fixture's checkpoint."""
    return functools.cache(lambda name: write_checkpoint(name, tmp_path_factory.mktemp(name)))


def make_application(folder: Path, degree: int, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    from nxdi_qwen.parity.targets.nxdi_application import application

    return application(folder, tp_degree=degree, torch_dtype=dtype, seq_len=128, **options)


@pytest.mark.nxdi
@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_nxd_makes_the_same_of_the_whole(checkpoint: MakeCheckpoint, tmp_path: Path, name: str, degree: int) -> None:
    for dtype in (torch.float32, BFLOAT16):
        app = make_application(checkpoint(name), degree, dtype)
        folder = tmp_path / str(dtype)
        app.get_builder().shard_checkpoint(serialize_path=str(folder / "theirs"))
        app.shard_weights(str(folder))
        theirs, ours = files(folder / "theirs"), files(folder / "weights")
        assert len(ours) == len(theirs) == degree
        for own, their in zip(ours, theirs, strict=True):
            assert_same(own, their)
            assert any("A_log" in key and tensor.dtype == torch.float32 for key, tensor in own.items())


@pytest.mark.nxdi
def test_nxdi_loads_the_files_of_its_host(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = checkpoint("qwen3_5_moe")
    make_application(folder, 4).shard_weights(str(tmp_path / "all"))
    app = make_application(folder, 4, start_rank_id=2, local_ranks_size=2)
    app.shard_weights(str(tmp_path / "host"))
    assert [path.name for path in sorted((tmp_path / "host/weights").iterdir())] == [rank_file(2), rank_file(3)]
    loaded: list[Any] = []
    app.traced_model = SimpleNamespace(nxd_model=SimpleNamespace(initialize=lambda *args: loaded.extend(args)))
    app.load_weights(str(tmp_path / "host"))
    weights, start = loaded
    assert start.tolist() == [2] and len(weights) == 2
    for own, whole in zip(weights, files(tmp_path / "all/weights")[2:], strict=True):
        assert_same(own, whole)


@pytest.mark.nxdi
@pytest.mark.parametrize("options", [{"skip_sharding": True}, {"save_sharded_checkpoint": False}])
def test_what_nxdi_skips_is_skipped(checkpoint: MakeCheckpoint, tmp_path: Path, options: dict[str, bool]) -> None:
    called: list[Any] = []
    app = make_application(checkpoint("qwen3_5"), 1, **options)
    app.shard_weights(str(tmp_path), pre_shard_weights_hook=called.append)
    assert called == [app] and list(tmp_path.iterdir()) == []


# --- By itself


def write(folder: Path, degree: int, source: Iterator[Block], config: ModelConfig = CONFIG) -> list[dict[str, Tensor]]:
    write_nxdi_ranks(folder, range(degree), config, BFLOAT16, degree, source)
    return files(folder)


def drawn() -> Iterator[Block]:
    return random_blocks(CONFIG, BFLOAT16, 0)


def test_the_experts_by_hand(tmp_path: Path) -> None:
    whole = dict(collect(drawn(), CONFIG, BFLOAT16))
    gate, up, down = (whole[f"layers.0.mlp.experts.{part}_proj"] for part in ("gate", "up", "down"))
    place = "layers.0.mlp.routed."
    for rank, tensors in enumerate(write(tmp_path, 2, drawn())):
        own = slice(4 * rank, 4 * rank + 4)
        gate_up = tensors[place + "expert_mlps.mlp_op.gate_up_proj.weight"]
        assert gate_up.shape == (4, 16, 8)
        assert torch.equal(gate_up[..., :4], gate[:, own].transpose(1, 2))
        assert torch.equal(gate_up[..., 4:], up[:, own].transpose(1, 2))
        place_down = tensors[place + "expert_mlps.mlp_op.down_proj.weight"]
        assert torch.equal(place_down, down[:, :, own].transpose(1, 2))
        router = tensors[place + "router.linear_router.weight"]
        assert router.dtype == torch.float32 and torch.equal(router, whole["layers.0.mlp.router.weight"].float())
        for name in ("", "embed_tokens."):
            assert tensors[name + "rank_util.rank"].tolist() == [rank]


def test_neither_the_size_of_blocks_nor_their_order_matters(tmp_path: Path) -> None:
    """Row by row, from the last to the first."""
    rows = [
        Block(block.name, (*block.start[:-1], block.start[-1] + row), block.data.narrow(len(block.start) - 1, row, 1))
        for block in drawn()
        for row in range(block.data.shape[len(block.start) - 1])
    ]
    once = write(tmp_path / "once", 4, drawn())
    for ours, theirs in zip(write(tmp_path / "rows", 4, reversed(rows)), once, strict=True):
        assert_same(ours, theirs)


def failing(error: BaseException) -> Iterator[Block]:
    yield next(drawn())
    raise error


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_was_there_stays_when_writing_fails(tmp_path: Path, error: BaseException) -> None:
    before = write(tmp_path, 2, drawn())
    with pytest.raises(InputError if isinstance(error, OSError) else type(error)):
        write(tmp_path, 2, failing(error))
    for ours, theirs in zip(files(tmp_path), before, strict=True):
        assert_same(ours, theirs)


def test_old_and_new_files_are_never_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails between the first rank's name and the second's leaves the first one only."""
    write(tmp_path, 2, random_blocks(CONFIG, BFLOAT16, 1))
    rename = Path.replace

    def failing_rename(path: Path, target: Path) -> Path:
        if target.name == rank_file(1):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", failing_rename)
    with pytest.raises(InputError, match="Input/output error"):
        write(tmp_path, 2, drawn())
    assert [path.name for path in tmp_path.iterdir()] == [rank_file(0)]


def test_a_rank_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rank 2 does not exist at degree 2"):
        write_nxdi_ranks(tmp_path / "weights", [2], CONFIG, BFLOAT16, 2, drawn())
    assert list(tmp_path.iterdir()) == []


# --- Memory


def convert(source: Path, out: Path, config: ModelConfig) -> tuple[int, float]:
    """Bytes by which this process grew at its largest, and seconds of processor time."""
    torch.set_num_threads(1)
    stored = Checkpoint.open(source)
    plan = plan_weights(config, stored)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now: imports took more for a moment
    base, start = peak_rss_bytes(), time.process_time()
    write_nxdi_ranks(out, range(4), plan.config, BFLOAT16, 4, checkpoint_blocks(plan, stored, BFLOAT16))
    return peak_rss_bytes() - base, time.process_time() - start


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM is read from /proc")
def test_six_hundred_megabytes_in_a_hundred_and_fifty(tmp_path: Path) -> None:
    config = replace(model_of(0.9), vocab_size=24576)
    size = make_checkpoint(tmp_path / "checkpoint", config)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        grown, seconds = pool.apply(convert, (tmp_path / "checkpoint", tmp_path / "weights", config))
    print(f"{size / 1e6:.0f} MB in {seconds:.1f} s, {grown / 1e6:.0f} MB above the base process")
    assert size > 550e6 and sum(path.stat().st_size for path in (tmp_path / "weights").iterdir()) > size
    assert 1e6 < grown < 150e6
    assert seconds < 15
