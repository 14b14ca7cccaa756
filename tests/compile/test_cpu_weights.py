"""Weights in memory against what safetensors reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nxdi_qwen.compile import cpu_weights
from nxdi_qwen.compile.cpu_weights import load_weights
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.weights.header import Header, read_header


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Odd sizes in front of others, several dtypes, a scalar."""
    path = tmp_path / "weights.safetensors"
    tensors = {
        "odd": torch.randn(3).to(torch.bfloat16),
        "rank": torch.tensor([5]),
        "matrix": torch.randn(70, 129).to(torch.bfloat16),
        "scalar": torch.tensor(0.5),
        "large": torch.randn(700, 1025),
    }
    save_file(tensors, path)
    return path


def test_all_tensors_bit_by_bit_and_aligned(file: Path) -> None:
    expected, loaded = load_file(file), load_weights(file)
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name
        assert tensor.data_ptr() % 64 == 0 and tensor.is_contiguous(), name


def test_a_file_that_shrinks_after_its_header_was_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shrinks(path: Path) -> Header:
        header = read_header(path)
        with path.open("r+b") as opened:
            opened.truncate(header.file_size - 1)
        return header

    monkeypatch.setattr(cpu_weights, "read_header", shrinks)
    with pytest.raises(InputError, match=r"weights.safetensors is truncated: \w+ ends behind its end"):
        load_weights(file)


def test_a_kernel_without_large_pages(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_weights.mmap, "MADV_HUGEPAGE", -1, raising=False)  # an advice that no kernel takes
    assert load_weights(file)["scalar"] == 0.5
