"""Write a safetensors file as its tensors arrive, never holding more than one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from nxdi_qwen.modeling.weights.checkpoint import memory_of
from nxdi_qwen.modeling.weights.header import DTYPES
from nxdi_qwen.modeling.weights.layout import Specs

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 64  # of the data's start, so that a mapped file gives aligned tensors


def write_safetensors(
    path: Path,
    specs: Specs,
    tensors: Iterable[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write `tensors`, which must be exactly those of `specs` (name -> (shape, dtype)), in any order; fsync at the end.

    `progress(done, total)` is called with bytes of data after each tensor. Raises ValueError for a tensor that is
    absent, unknown, repeated or unlike its spec. Whatever goes wrong, no file is left behind.
    """
    offsets, total = _offsets(specs)
    header = _header(specs, offsets, metadata)
    pending, done = dict(specs), 0
    try:
        with path.open("wb") as file:
            file.write(header)
            for name, tensor in tensors:
                if pending.pop(name, None) != (tuple(tensor.shape), tensor.dtype):
                    raise ValueError(f"{name} [{tuple(tensor.shape)}, {tensor.dtype}] was not asked for")
                file.seek(len(header) + offsets[name])
                file.write(memory_of(tensor.detach().contiguous()))
                done += tensor.nbytes
                del tensor  # before the next one is made
                if progress is not None:
                    progress(done, total)
            if pending:
                raise ValueError(f"{len(pending)} tensors did not arrive: {next(iter(pending))} ...")
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _offsets(specs: Specs) -> tuple[dict[str, int], int]:
    """Byte offset of each tensor, and their sum.

    Wide dtypes first: the format allows no holes, and readers that view the data in place need every tensor at a
    multiple of its element size.
    """
    offsets: dict[str, int] = {}
    end = 0
    for name, (shape, dtype) in sorted(specs.items(), key=lambda item: -item[1][1].itemsize):
        offsets[name] = end
        end += math.prod(shape) * dtype.itemsize
    return offsets, end


def _header(specs: Specs, offsets: dict[str, int], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, offset in offsets.items():
        shape, dtype = specs[name]
        end = offset + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
