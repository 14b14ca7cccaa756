"""The writer, read back by the safetensors library: any order of arrival, nothing lost, nothing left on failure."""

import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from nxdi_qwen.modeling.weights import Block, collect, random_blocks, read_header, weight_specs, write_ranks
from tests.modeling.weights.synthetic import make_config

CONFIG = make_config("qwen3_next", head_dim=16)
DTYPE = torch.bfloat16
BLOCKS = list(random_blocks(CONFIG, DTYPE, 0))
NORM = next(place for place, block in enumerate(BLOCKS) if block.name == "norm.weight")


def write(folder, blocks, progress=None):
    write_ranks([folder / "w"], CONFIG, DTYPE, blocks, progress=progress)
    return folder / "w"


def test_the_library_reads_it(tmp_path):
    seen = []
    path = write(tmp_path, iter(BLOCKS), lambda done, total: seen.append((done, total)))
    loaded, expected = load_file(path), dict(collect(BLOCKS, CONFIG, DTYPE))
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"rank": "0", "degree": "1", "expert_degree": "1"}
    total = sum(tensor.nbytes for name, tensor in expected.items() if name not in ("rank", "rope.inv_freq"))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) == len(BLOCKS) and seen[-1] == (total, total)
    header = read_header(path)
    assert {name: (info.shape, info.dtype) for name, info in header.tensors.items()} == weight_specs(CONFIG, DTYPE)
    assert all(info.offset % info.dtype.itemsize == 0 for info in header.tensors.values())
    assert {tensor.dtype.itemsize for tensor in expected.values()} == {2, 4, 8}


def test_order_of_arrival_does_not_change_the_file(tmp_path):
    first = write(tmp_path, iter(BLOCKS)).read_bytes()
    assert write(tmp_path, reversed(BLOCKS)).read_bytes() == first


@pytest.mark.parametrize("bad", [Block("other", (0,), torch.zeros(1)), Block("norm.weight", (0,), torch.zeros(16))])
def test_what_was_not_asked_for(tmp_path, bad):
    with pytest.raises(ValueError, match=f"{bad.name} .* was not asked for"):
        write(tmp_path, [*BLOCKS[:NORM], bad, *BLOCKS[NORM + 1 :]])
    assert os.listdir(tmp_path) == []


def test_absent_and_repeated(tmp_path):
    with pytest.raises(ValueError, match=r"1 tensors did not arrive: norm\.weight"):
        write(tmp_path, [*BLOCKS[:NORM], *BLOCKS[NORM + 1 :]])
    with pytest.raises(ValueError, match=r"1 tensors did not arrive: norm\.weight"):
        dict(collect([*BLOCKS[:NORM], *BLOCKS[NORM + 1 :]], CONFIG, DTYPE))
    with pytest.raises(ValueError, match=r"norm\.weight .* was not asked for"):
        write(tmp_path, [*BLOCKS, BLOCKS[NORM]])
    assert os.listdir(tmp_path) == []


def test_nothing_is_left_when_the_source_fails(tmp_path):
    def blocks():
        yield BLOCKS[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, blocks())
    assert os.listdir(tmp_path) == []
