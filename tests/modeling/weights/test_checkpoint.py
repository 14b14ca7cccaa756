"""Files that are absent, damaged or contradict each other are refused by name, from their headers."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.weights import Checkpoint, read_header

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.arange(5).to(torch.bfloat16),
    "c": torch.tensor(7.0),
    "empty": torch.empty(0, 3),
    "wide": torch.arange(6, dtype=torch.int64).view(3, 2),
    "fp8": torch.arange(8, dtype=torch.float32).to(torch.float8_e4m3fn).view(2, 2, 2),
}
INDEX = "model.safetensors.index.json"


def write_index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def sharded(folder):
    save_file({"a": TENSORS["a"], "b": TENSORS["b"]}, folder / "one.safetensors")
    save_file({"c": TENSORS["c"]}, folder / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    write_index(folder, weight_map)
    return weight_map


def test_reads_what_the_library_wrote(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        info, read = checkpoint[name], checkpoint.read(name)
        assert (info.shape, info.dtype) == (tuple(tensor.shape), tensor.dtype)
        assert read.dtype == tensor.dtype and read.shape == tensor.shape
        assert torch.equal(read.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert torch.equal(checkpoint.read("wide", 1), TENSORS["wide"][1])
    assert torch.equal(checkpoint.read("fp8", 1).float(), TENSORS["fp8"][1].float())
    assert torch.equal(checkpoint.read("a", rows=(1, 3)), TENSORS["a"][1:3])
    assert torch.equal(checkpoint.read("b", rows=(2, 4)), TENSORS["b"][2:4])
    assert torch.equal(checkpoint.read("fp8", 1, (1, 2)).float(), TENSORS["fp8"][1, 1:2].float())


def test_sharded(tmp_path):
    weight_map = sharded(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert {name: info.file.name for name, info in checkpoint.items()} == weight_map
    assert all(torch.equal(checkpoint.read(name), TENSORS[name]) for name in weight_map)


def test_single_file_named_by_an_index(tmp_path):
    save_file({"a": TENSORS["a"]}, tmp_path / "model.safetensors")
    write_index(tmp_path, {"a": "model.safetensors"})
    assert list(Checkpoint.open(tmp_path)) == ["a"]


def test_header_hash_and_metadata(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    header = read_header(path)
    assert header.metadata == {"format": "pt"} and header.file_size == path.stat().st_size
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"wide"', b'"wild"', 1))
    assert read_header(path).sha256 != header.sha256
    path.write_bytes(data[:-1] + b"\x01")
    assert read_header(path).sha256 == header.sha256


@pytest.mark.parametrize("cut", [1, 200, 10_000_000])
def test_truncated_file(tmp_path, cut):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    data = path.read_bytes()
    path.write_bytes(data[: max(len(data) - cut, 4)])
    with pytest.raises(InputError, match=r"model\.safetensors"):
        Checkpoint.open(tmp_path)


def test_truncation_names_the_tensor(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"first": torch.ones(4), "last": torch.ones(4)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match="truncated: last ends"):
        Checkpoint.open(tmp_path)


def _cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def _replace(path):
    save_file({"a": torch.zeros(4)}, path.with_name("new"))
    path.with_name("new").replace(path)


def _write_over(path):
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(bytes(4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_cut, "model.safetensors changed while a was read: wait until it is complete"),
        (_replace, "model.safetensors changed while a was read"),
        (_write_over, "model.safetensors changed while a was read"),
        (Path.unlink, "cannot read .*model.safetensors: No such file"),
    ],
)
def test_a_file_that_changes_after_it_was_opened(tmp_path, change, message):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4)}, path)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.read("a").tolist() == [1.0] * 4
    change(path)
    with pytest.raises(InputError, match=message):
        checkpoint.read("a")


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry([2], 0, 8)}, 9, "1 bytes after its last tensor"),
        ({"a": entry([2], 0, 8), "b": entry([2], 12, 20)}, 20, "b overlaps another tensor or leaves a hole"),
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, 12, "b overlaps another tensor or leaves a hole"),
        ({"a": entry([3], 0, 8)}, 8, "entry for a is damaged"),
        ({"a": entry([-2], 0, 8)}, 8, "entry for a is damaged"),
        ({"a": 3}, 8, "entry for a is damaged"),
        ({"a": entry([2], 0, 8, "F4")}, 8, "a has dtype F4"),
        ({"a": entry([2], 0, 8, [])}, 8, "a has dtype \\[\\]"),
        ("9" * 5000, 0, "no JSON"),
        ([1], 0, "no JSON object"),
        ("{", 0, "no JSON"),
        ('{"a": 1, "a": 2}', 0, "names a tensor twice"),
        ({"__metadata__": 3}, 0, "__metadata__"),
    ],
)
def test_damaged_header(tmp_path, header, data, message):
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    with pytest.raises(InputError, match=message):
        Checkpoint.open(tmp_path)


def test_git_lfs_pointer(tmp_path):
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(InputError, match="Git LFS"):
        Checkpoint.open(tmp_path)


def test_absent_folder(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        Checkpoint.open(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "no weights"),
        (["pytorch_model.bin"], r"only \.bin weights \(pytorch_model\.bin\); convert them to safetensors"),
        (["model.gguf"], r"only \.gguf"),
        (["model-00001-of-00002.safetensors"], "download the index"),
    ],
)
def test_other_formats(tmp_path, files, message):
    for file in files:
        (tmp_path / file).write_bytes(b"")
    with pytest.raises(InputError, match=message):
        Checkpoint.open(tmp_path)


def test_index_names_an_absent_file(tmp_path):
    sharded(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(InputError, match=r"names two\.safetensors, absent"):
        Checkpoint.open(tmp_path)


def test_index_names_a_tensor_its_file_lacks(tmp_path):
    write_index(tmp_path, sharded(tmp_path) | {"gone": "two.safetensors"})
    with pytest.raises(InputError, match=r"two\.safetensors lacks gone"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("change", [{}, {"b": "two.safetensors"}])
def test_tensor_the_index_does_not_place_there(tmp_path, change):
    weight_map = sharded(tmp_path)
    del weight_map["b"]
    write_index(tmp_path, weight_map | change)
    with pytest.raises(InputError, match=r"one\.safetensors holds b, which"):
        Checkpoint.open(tmp_path)


def test_an_index_that_cannot_be_read(tmp_path):
    (tmp_path / INDEX).mkdir()
    with pytest.raises(InputError, match="no usable weight_map"):
        Checkpoint.open(tmp_path)


def test_a_file_name_that_no_file_system_takes(tmp_path):
    write_index(tmp_path, {"a": "x" * 300 + ".safetensors"})
    with pytest.raises(InputError, match="absent from"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "\ufeff{"])
def test_unusable_index(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(InputError, match="no usable weight_map"):
        Checkpoint.open(tmp_path)


def test_index_points_outside_the_folder(tmp_path):
    write_index(tmp_path, {"a": "../one.safetensors"})
    with pytest.raises(InputError, match="not a file of this folder"):
        Checkpoint.open(tmp_path)


def test_single_file_beside_another_index(tmp_path):
    sharded(tmp_path)
    save_file({"a": TENSORS["a"]}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="remove the stale one"):
        Checkpoint.open(tmp_path)
