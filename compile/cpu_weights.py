"""Weights of an artifact, in memory that a CPU reads fast."""

from __future__ import annotations

import contextlib
import math
import mmap
from pathlib import Path

import torch
from torch import Tensor

from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.weights.header import read_header

# A cache line: no vector load from the start of a tensor then touches two.
_ALIGNMENT = 64


def load_weights(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, by name, read once into one piece of memory.

    Not mapped from the file, which the system does in pages of 4 KiB: a matrix product reads many rows side by side,
    and waits for the address of each page. Memory that asks for it gets pages of 2 MiB from Linux. Raises InputError
    where the file is not what `read_header` accepts, or became shorter meanwhile.
    """
    tensors = read_header(path).tensors
    places, size = {}, 0
    for name, info in tensors.items():
        places[name] = size
        size += -(-info.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel that has no large pages refuses; the small ones do as well.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    weights = {}
    with path.open("rb") as file, memoryview(memory) as view:
        for name, info in tensors.items():
            begin = places[name]
            file.seek(info.offset)
            if file.readinto(view[begin : begin + info.nbytes]) < info.nbytes:
                raise InputError(f"{path} is truncated: {name} ends behind its end; compile the artifact again")
            flat = torch.frombuffer(memory, dtype=info.dtype, count=math.prod(info.shape), offset=begin)
            weights[name] = flat.reshape(info.shape)
    return weights
