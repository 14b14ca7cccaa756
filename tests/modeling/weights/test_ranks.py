"""One file a rank: every row lands in its place whatever the form of the checkpoint and wherever blocks end."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nxdi_qwen.modeling.partition import Parallel, take_part
from nxdi_qwen.modeling.rope_frequencies import rope_inv_freq
from nxdi_qwen.modeling.weights import (
    Block,
    Checkpoint,
    blocks,
    checkpoint_blocks,
    collect,
    random_blocks,
    weight_cuts,
    weight_specs,
    write_ranks,
)
from tests.measure_conversion import measure
from tests.modeling.weights.synthetic import checkpoint_shapes, converted, make_config, planned, tagged
from tests.modeling.weights.test_quantization import SMALL, quantized

# Two key heads of three value heads each, one KV head of two query heads: 4 ranks replicate and fill up.
SIZES = {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
DEGREES = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]


def write(folder: Path, config, dtype, stream: Iterator[Block], degree: int, expert_degree: int) -> list[dict]:
    folder.mkdir()
    paths = [folder / str(rank) for rank in range(degree)]
    write_ranks(paths, config, dtype, stream, expert_degree)
    return [load_file(path) for path in paths]


def check(ranks: list[dict[str, Tensor]], whole: dict[str, Tensor], config, dtype, expert_degree: int) -> None:
    for rank, tensors in enumerate(ranks):
        parallel = Parallel(len(ranks), rank, expert_degree)
        specs, cuts = weight_specs(config, dtype, parallel), weight_cuts(config, parallel)
        assert {n: (tuple(t.shape), t.dtype) for n, t in tensors.items()} == specs
        assert tensors.pop("rank").tolist() == [rank]
        assert torch.equal(tensors.pop("rope.inv_freq"), rope_inv_freq(config))
        for name, tensor in tensors.items():
            assert torch.equal(tensor, take_part(whole[name], cuts[name], parallel)), (rank, name)
    for name, tensor in whole.items():
        if name in ("rank", "rope.inv_freq"):
            continue
        held = torch.cat([tensors[name].flatten() for tensors in ranks]).unique()
        expected = torch.cat([tensor.flatten(), torch.zeros(0 if held[0] else 1)]).unique()
        assert torch.equal(held, expected), f"{name}: all ranks together hold what there is, and zeros"


@pytest.mark.parametrize(("degree", "expert_degree"), DEGREES)
@pytest.mark.parametrize("block_bytes", [1, 3000])
@pytest.mark.parametrize(
    ("family", "fused", "stacked"),
    [("qwen3_next", True, False), ("qwen3_next", True, True), ("qwen3_5_moe", False, True), ("qwen3_5", False, False)],
)
def test_every_form(tmp_path, monkeypatch, family, fused, stacked, block_bytes, degree, expert_degree):
    """Blocks of one row, and blocks that end within heads, segments and experts."""
    config = make_config(family, attention_bias=True, **SIZES)
    file = {n: t + 1 for n, t in tagged(checkpoint_shapes(config, fused=fused, stacked=stacked)).items()}  # no zeros
    plan, checkpoint = planned(tmp_path / "checkpoint", config, file)
    whole = converted(plan, checkpoint)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block_bytes)
    ours = checkpoint_blocks(plan, checkpoint, torch.float32)
    ranks = write(tmp_path / "ranks", config, torch.float32, ours, degree, expert_degree)
    check(ranks, whole, config, torch.float32, expert_degree)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stacked", [False, True])
def test_fp8_scales_come_along(tmp_path, monkeypatch, stacked, dtype):
    config = make_config("qwen3_next", **SIZES)
    file, meaning = quantized(tagged(checkpoint_shapes(config, fused=True, stacked=stacked)), (4, 8))
    plan, checkpoint = planned(tmp_path / "fp8", config, file, SMALL)
    whole = converted(*planned(tmp_path / "plain", config, meaning), dtype)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 500)
    ranks = write(tmp_path / "ranks", config, dtype, checkpoint_blocks(plan, checkpoint, dtype), 4, 2)
    for rank, tensors in enumerate(ranks):
        parallel = Parallel(4, rank, 2)
        for name, cuts in weight_cuts(config, parallel).items():
            if name != "rank":
                assert torch.equal(tensors[name], take_part(whole[name], cuts, parallel)), name


@pytest.mark.parametrize("block_bytes", [1, 1 << 25])
def test_a_rank_in_memory_is_its_file(tmp_path, monkeypatch, block_bytes):
    """The same part whether a rank collects it or reads its file; random weights as those of a checkpoint."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block_bytes)
    config = make_config("qwen3_5_moe", **SIZES)
    ranks = write(tmp_path / "ranks", config, torch.bfloat16, random_blocks(config, torch.bfloat16, 0), 4, 2)
    for rank, tensors in enumerate(ranks):
        held = dict(collect(random_blocks(config, torch.bfloat16, 0), config, torch.bfloat16, Parallel(4, rank, 2)))
        assert list(held) == list(weight_specs(config, torch.bfloat16))
        assert held.keys() == tensors.keys()
        for name, tensor in held.items():
            assert tensor.dtype == tensors[name].dtype and torch.equal(tensor, tensors[name]), name
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_the_numbers_by_hand(tmp_path):
    """Rank 1 of 2 has key head 1 with its value heads 3, 4, 5, and experts 2 and 3 whole."""
    config = make_config("qwen3_next", **SIZES)
    file = tagged(checkpoint_shapes(config, fused=True, stacked=True))
    plan, checkpoint = planned(tmp_path / "checkpoint", config, file)
    stream = checkpoint_blocks(plan, checkpoint, torch.float32)
    own = write(tmp_path / "ranks", config, torch.float32, stream, 2, 2)[1]
    gdn = "layers.0.linear_attn."
    qkvz, ba = (file[f"model.{gdn}in_proj_{name}.weight"] for name in ("qkvz", "ba"))
    conv, out = file[f"model.{gdn}conv1d.weight"][:, 0], file[f"model.{gdn}out_proj.weight"]
    for name, start, stop in (("q", 26, 30), ("k", 30, 34), ("v", 34, 43), ("z", 43, 52)):
        assert torch.equal(own[f"{gdn}{name}_proj.weight"], qkvz[start:stop])
    assert torch.equal(own[f"{gdn}b_proj.weight"], ba[6:9]) and torch.equal(own[f"{gdn}a_proj.weight"], ba[9:12])
    for name, start, stop in (("q", 4, 8), ("k", 12, 16), ("v", 25, 34)):
        assert torch.equal(own[f"{gdn}{name}_conv.weight"], conv[start:stop])
    assert torch.equal(own[f"{gdn}A_log.weight"], file[f"model.{gdn}A_log"][3:])
    assert torch.equal(own[f"{gdn}out_proj.weight"], out[:, 9:])
    gate_up, down = (file[f"model.layers.1.mlp.experts.{name}"] for name in ("gate_up_proj", "down_proj"))
    assert torch.equal(own["layers.1.mlp.experts.gate_proj"], gate_up[2:, :8])
    assert torch.equal(own["layers.1.mlp.experts.up_proj"], gate_up[2:, 8:])
    assert torch.equal(own["layers.1.mlp.experts.down_proj"], down[2:])
    assert torch.equal(own["layers.1.self_attn.o_proj.weight"], file["model.layers.1.self_attn.o_proj.weight"][:, 8:])
    assert torch.equal(own["embed_tokens.weight"], file["model.embed_tokens.weight"][16:])


@pytest.mark.parametrize("stacked", [False, True])
def test_each_byte_is_read_once_and_few_at_a_time(tmp_path, monkeypatch, stacked):
    config = make_config("qwen3_next", vocab_size=64, **SIZES)
    plan, checkpoint = planned(tmp_path / "c", config, tagged(checkpoint_shapes(config, fused=True, stacked=stacked)))
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1024)
    read, counts, largest = Checkpoint.read, dict.fromkeys(checkpoint, 0), 0

    def counting(self, name, index=None, rows=None):
        nonlocal largest
        tensor = read(self, name, index, rows)
        counts[name] += tensor.numel()
        largest = max(largest, tensor.nbytes)
        return tensor

    monkeypatch.setattr(Checkpoint, "read", counting)
    write(tmp_path / "ranks", config, torch.float32, checkpoint_blocks(plan, checkpoint, torch.float32), 4, 1)
    assert counts == {name: math.prod(info.shape) for name, info in checkpoint.items()}
    assert largest <= 1024


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM is read from /proc")
def test_a_gigabyte_in_three_hundred_megabytes(tmp_path):
    measured = measure(tmp_path, gigabytes=1.0, degree=4)
    print(measured)
    assert measured.checkpoint > 0.9e9
    files = sorted((tmp_path / "ranks").iterdir())
    assert len(files) == 4 and len({file.stat().st_size for file in files}) == 1
    assert sum(file.stat().st_size for file in files) > measured.checkpoint
    assert measured.peak - measured.base < 300e6
