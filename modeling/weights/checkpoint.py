"""A checkpoint folder: every tensor's name, shape, dtype and place, and lazy reading of one tensor at a time."""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.weights.header import FileVersion, TensorInfo, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class Checkpoint(Mapping[str, TensorInfo]):
    """Name -> TensorInfo of a folder's safetensors files; all headers are checked when it is opened.

    Data is read with plain reads into the tensor's own memory: a memory map would count every page it touched as
    resident until the file is closed, and double the peak.
    """

    def __init__(self, folder: Path, tensors: dict[str, TensorInfo]) -> None:
        self.folder = folder
        self._tensors = tensors

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Open `model.safetensors`, or the shards that `model.safetensors.index.json` names.

        Raises InputError, naming the file and tensor, for a damaged or absent file, an index that disagrees with its
        shards, and a folder without safetensors files.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise InputError(f"no such folder: {folder}")
        single, index = folder / SINGLE_FILE, folder / INDEX_FILE
        if index.exists():
            weight_map = _read_index(index)
            if single.exists() and set(weight_map.values()) != {SINGLE_FILE}:
                raise InputError(f"{folder} holds both {SINGLE_FILE} and an index of other files; remove the stale one")
            return cls(folder, _read_shards(folder, weight_map))
        if single.exists():
            return cls(folder, read_header(single).tensors)
        raise InputError(_why_no_weights(folder))

    def __getitem__(self, name: str) -> TensorInfo:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def read(self, name: str, index: int | None = None, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """A new tensor with the data of `name` in the file's dtype.

        With `index`, only that slice of the first dimension; with `rows`, of what remains only rows [start, stop).
        Raises InputError where the file is not the one that was opened, or not as it was.
        """
        info = self._tensors[name]
        shape, offset = info.shape, info.offset
        if index is not None:
            shape = shape[1:]
            offset += index * math.prod(shape) * info.dtype.itemsize
        if rows is not None:
            offset += rows[0] * math.prod(shape[1:]) * info.dtype.itemsize
            shape = (rows[1] - rows[0], *shape[1:])
        tensor = torch.empty(shape, dtype=info.dtype)
        view, done = memory_of(tensor), 0
        try:
            with info.file.open("rb", buffering=0) as file:
                same = FileVersion.of(file) == info.version
                file.seek(offset)
                while same and done < len(view):  # the system reads at most 2 GiB at a time
                    count = file.readinto(view[done:])
                    done += count
                    same = count > 0 and FileVersion.of(file) == info.version
        except OSError as error:
            raise InputError(f"cannot read {info.file}: {error.strerror}") from error
        if not same:
            raise InputError(f"{info.file} changed while {name} was read: wait until it is complete, and begin again")
        return tensor


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable, without a copy; the view keeps the tensor alive."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    if not tensor.nbytes:
        return memoryview(b"")
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory)


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        usable = isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        usable = False
    if not usable or not weight_map:
        raise InputError(f"{path} has no usable weight_map; download it again")
    for name, file in weight_map.items():
        if Path(file).name != file:
            raise InputError(f"{path}: {name} is placed in {file!r}, which is not a file of this folder")
    return weight_map


def _read_shards(folder: Path, weight_map: dict[str, str]) -> dict[str, TensorInfo]:
    files = sorted(set(weight_map.values()))
    absent = [file for file in files if not os.path.exists(folder / file)]  # False also for a name that is too long
    if absent:
        raise InputError(f"{INDEX_FILE} names {name_list(absent)}, absent from {folder}; download the missing files")
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        header = read_header(folder / file)
        unlisted = [name for name in header.tensors if weight_map.get(name) != file]
        if unlisted:
            raise InputError(f"{folder / file} holds {name_list(unlisted)}, which {INDEX_FILE} does not place there")
        tensors.update(header.tensors)
    lacking = [name for name in weight_map if name not in tensors]
    if lacking:
        where = weight_map[lacking[0]]
        raise InputError(f"{folder / where} lacks {name_list(lacking)}, which {INDEX_FILE} places there")
    return {name: tensors[name] for name in weight_map}


def _why_no_weights(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    if any(name.endswith(".safetensors") for name in names):
        return f"{folder} has safetensors files but neither {SINGLE_FILE} nor {INDEX_FILE}; download the index"
    for suffix in (".bin", ".pt", ".pth", ".gguf"):
        found = [name for name in names if name.endswith(suffix)]
        if found:
            return f"{folder} has only {suffix} weights ({found[0]}); convert them to safetensors"
    return f"{folder} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}"


def name_list(names: Iterable[str], shown: int = 3) -> str:
    """The first few names and how many more there are."""
    names = list(names)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
