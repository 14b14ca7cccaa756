"""The header of a safetensors file, read and checked without touching the data.

A file is: 8 bytes, the header's length n (little endian); n bytes of JSON, `{name: {dtype, shape, data_offsets}}` with
an optional `__metadata__`; then the data, without holes. Source: the format's specification in the safetensors README.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeGuard

import torch

from nxdi_qwen.modeling.errors import InputError

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_LFS_POINTER = b"version https://git-lfs"


class FileVersion(NamedTuple):
    """What changes when a file is written to or replaced: its number, size in bytes and time of change in ns."""

    inode: int
    size: int
    modified: int

    @classmethod
    def of(cls, file: IO[bytes]) -> FileVersion:
        """Of an open file."""
        status = os.fstat(file.fileno())
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `offset` counts bytes from the start of `file`, as long as that is `version`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    offset: int
    version: FileVersion

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """A checked header; `sha256` is over the length field and the JSON: it fixes every name, shape, dtype and place."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    sha256: str
    file_size: int


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file; no data is read.

    Raises InputError for a file that is absent, is no safetensors file, is truncated or has bytes left over, naming the
    file and, where there is one, the tensor.
    """
    try:
        with path.open("rb") as file:
            version = FileVersion.of(file)
            length_field = file.read(_LENGTH_BYTES)
            length = int.from_bytes(length_field, "little")
            if length_field == _LFS_POINTER[:_LENGTH_BYTES]:
                raise InputError(f"{path} is a Git LFS pointer, not the weights; fetch the file (git lfs pull)")
            if len(length_field) < _LENGTH_BYTES or length > _MAX_HEADER_BYTES:
                raise InputError(f"{path} is not a safetensors file; download it again")
            text = file.read(length)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    if len(text) < length:
        raise InputError(f"{path} is truncated inside its header ({version.size} bytes); download it again")
    entries = _parse(path, text)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise InputError(f"{path} has a damaged header (__metadata__); download it again")
    start = _LENGTH_BYTES + length
    tensors = {name: _tensor_info(path, version, start, name, entry) for name, entry in entries.items()}
    _check_extent(path, start, version.size, tensors)
    return Header(tensors, metadata, hashlib.sha256(length_field + text).hexdigest(), version.size)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            raise InputError(f"{path} names a tensor twice in its header; download it again")
        return entries

    try:
        entries = json.loads(text, object_pairs_hook=unique)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:  # also an integer of more digits than Python reads
        raise InputError(f"{path} is not a safetensors file (its header is no JSON); download it again") from error
    if not isinstance(entries, dict):
        raise InputError(f"{path} is not a safetensors file (its header is no JSON object); download it again")
    return entries


def _tensor_info(path: Path, version: FileVersion, start: int, name: str, entry: Any) -> TensorInfo:
    damaged = InputError(f"{path}: the header's entry for {name} is damaged; download the file again")
    if not isinstance(entry, dict):
        raise damaged
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not (_is_sizes(shape) and _is_sizes(offsets) and len(offsets) == 2):
        raise damaged
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InputError(f"{path}: {name} has dtype {dtype}, which this program does not read")
    info = TensorInfo(tuple(shape), DTYPES[dtype], path, start + offsets[0], version)
    if offsets[1] - offsets[0] != info.nbytes:
        raise damaged
    return info


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_extent(path: Path, start: int, size: int, tensors: dict[str, TensorInfo]) -> None:
    """The data must fill the file exactly, with neither holes nor overlaps."""
    expected = start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset != expected:
            raise InputError(f"{path}: the data of {name} overlaps another tensor or leaves a hole; download it again")
        expected += info.nbytes
        if expected > size:
            raise InputError(f"{path} is truncated: {name} ends at byte {expected} of {size}; download it again")
    if expected < size:
        raise InputError(f"{path} has {size - expected} bytes after its last tensor; download it again")
