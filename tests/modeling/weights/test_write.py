"""The streaming writer, read back by the safetensors library."""

import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from nxdi_qwen.modeling.weights import read_header, write_safetensors

TENSORS = {
    "odd": torch.arange(3).to(torch.bfloat16),
    "wide": torch.randn(4, 5, generator=torch.Generator().manual_seed(0)),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "empty": torch.empty(0, 2),
    "scalar": torch.tensor(1.5),
    "turned": torch.arange(6, dtype=torch.float32).view(2, 3).T,
}
SPECS = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()}


def test_the_library_reads_it(tmp_path):
    path, seen = tmp_path / "weights.safetensors", []
    stream = ((name, TENSORS[name]) for name in TENSORS)
    write_safetensors(path, SPECS, stream, {"made by": "test"}, lambda done, total: seen.append((done, total)))
    loaded = load_file(path)
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"made by": "test"}
    total = sum(tensor.nbytes for tensor in TENSORS.values())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) == len(TENSORS) and seen[-1] == (total, total)
    header = read_header(path)
    assert {name: (info.shape, info.dtype) for name, info in header.tensors.items()} == SPECS
    assert all(info.offset % info.dtype.itemsize == 0 for info in header.tensors.values())


def test_order_of_arrival_does_not_change_the_file(tmp_path):
    write_safetensors(tmp_path / "a", SPECS, iter(TENSORS.items()))
    write_safetensors(tmp_path / "b", SPECS, reversed(TENSORS.items()))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        {"wide": torch.zeros(5, 4)},
        {"wide": torch.zeros(4, 5, dtype=torch.float64)},
        {"other": torch.zeros(1)},
    ],
)
def test_unlike_its_spec(tmp_path, change):
    with pytest.raises(ValueError, match="was not asked for"):
        write_safetensors(tmp_path / "w", SPECS, iter((TENSORS | change).items()))
    assert os.listdir(tmp_path) == []


def test_absent_and_repeated(tmp_path):
    items = list(TENSORS.items())
    with pytest.raises(ValueError, match="1 tensors did not arrive: turned"):
        write_safetensors(tmp_path / "w", SPECS, items[:-1])
    with pytest.raises(ValueError, match=r"odd .* was not asked for"):
        write_safetensors(tmp_path / "w", SPECS, [items[0], items[0]])
    assert os.listdir(tmp_path) == []


def test_nothing_is_left_when_the_source_fails(tmp_path):
    def stream():
        yield "odd", TENSORS["odd"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_safetensors(tmp_path / "w", SPECS, stream())
    assert os.listdir(tmp_path) == []
