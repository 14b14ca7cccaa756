"""Write the safetensors files of all ranks in one pass over the weights, as their blocks arrive."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.partition import Parallel
from nxdi_qwen.modeling.weights.blocks import Account, Block, share
from nxdi_qwen.modeling.weights.checkpoint import memory_of
from nxdi_qwen.modeling.weights.header import DTYPES
from nxdi_qwen.modeling.weights.layout import Specs, derived_buffers, weight_cuts, weight_specs

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 64  # of the data's start, so that a mapped file gives aligned tensors


def rank_file(rank: int) -> str:
    """The name of a rank's weights, below the folder `weights`: the one under which NxDI looks for them."""
    return f"tp{rank}_sharded_checkpoint.safetensors"


def rank_metadata(parallel: Parallel) -> dict[str, str]:
    """What the header of a rank's file says about it."""
    place = {"rank": parallel.rank, "degree": parallel.degree, "expert_degree": parallel.expert_degree}
    return {key: str(value) for key, value in place.items()}


@dataclass(frozen=True)
class RankLayout:
    """What the file of one rank holds.

    `derived` are the tensors that no block brings, by name. `parts` turns a block of a whole parameter into the blocks
    that this file holds of it, whose `start` may go on to the columns.
    """

    specs: Specs
    metadata: Mapping[str, str]
    derived: Mapping[str, torch.Tensor]
    parts: Callable[[Block], Iterable[Block]]


def write_ranks(
    paths: Sequence[Path],
    config: ModelConfig,
    dtype: torch.dtype,
    blocks: Iterable[Block],
    expert_degree: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write one file a rank, in rank order, from the blocks of all whole parameters, under this project's names.

    See `write_files`.
    """
    ranks = [Parallel(len(paths), rank, expert_degree) for rank in range(len(paths))]
    specs, cuts = weight_specs(config, dtype, ranks[0]), weight_cuts(config, ranks[0])  # the same for every rank

    def layout(rank: Parallel) -> RankLayout:
        def parts(block: Block) -> list[Block]:
            own = share(block, cuts[block.name], rank)
            return [] if own is None else [own]

        return RankLayout(specs, rank_metadata(rank), derived_buffers(config, rank), parts)

    layouts = {path: layout(rank) for path, rank in zip(paths, ranks, strict=True)}
    write_files(layouts, Account(config, dtype), blocks, progress)


def write_files(
    layouts: Mapping[Path, RankLayout],
    account: Account,
    blocks: Iterable[Block],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the files of some ranks from the blocks of all whole parameters; fsync at the end.

    In memory is one block and a rank's part of it. `progress(done, total)` is called with bytes of whole parameters
    after each block. Raises ValueError for a block that is unknown or more than its parameter still lacks, and for
    parameters that do not arrive whole. Whatever goes wrong, no file is left behind.
    """
    try:
        with ExitStack() as stack:
            files = [
                (stack.enter_context(RankFile(path, layout.specs, layout.metadata)), layout)
                for path, layout in layouts.items()
            ]
            for file, layout in files:
                for name, tensor in layout.derived.items():
                    file.put(Block(name, (0,), tensor))
            for block in blocks:
                account.take(block)
                for file, layout in files:
                    for own in layout.parts(block):
                        file.put(own)
                if progress is not None:
                    progress(account.done, account.total)
            account.check_complete()
            for file, _ in files:
                file.sync()
    except BaseException:
        for path in layouts:
            path.unlink(missing_ok=True)
        raise


class RankFile:
    """A safetensors file that has its full size from the start, all zeros, and is filled in, in any order."""

    def __init__(self, path: Path, specs: Specs, metadata: Mapping[str, str]) -> None:
        self._specs = specs
        self._offsets, total = _offsets(specs)
        header = _header(specs, self._offsets, metadata)
        self._data_start = len(header)
        self._file = path.open("w+b")
        self._file.write(header)
        self._file.truncate(len(header) + total)

    def __enter__(self) -> RankFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def put(self, block: Block) -> None:
        """Write a block of one of the file's tensors. Columns that it leaves out keep what was there before."""
        shape, dtype = self._specs[block.name]
        data = block.data
        start = (*block.start, *(0 for _ in shape[len(block.start) :]))
        # In one piece lies what is whole in all dimensions behind the first in which it has several entries.
        outer = next((dim for dim, count in enumerate(data.shape) if count > 1), 0) + 1
        entry = sum(start[dim] * math.prod(shape[dim + 1 :]) for dim in range(outer))
        place = self._data_start + self._offsets[block.name] + entry * dtype.itemsize
        piece_shape = data.shape[:outer] + shape[outer:]
        if data.shape == piece_shape:
            piece = data.contiguous()
        else:
            # Read and written whole: thousands of single rows would cost a system call each, and a map of the file
            # would end the process where the disk is full.
            piece = torch.empty(piece_shape, dtype=dtype)
            self._file.seek(place)
            self._file.readinto(memory_of(piece))
            hole = piece
            for dim in range(outer, len(shape)):
                hole = hole.narrow(dim, start[dim], data.shape[dim])
            hole.copy_(data)
        self._file.seek(place)
        self._file.write(memory_of(piece))

    def sync(self) -> None:
        """Make sure that the disk has everything."""
        self._file.flush()
        os.fsync(self._file.fileno())


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


def _header(specs: Specs, offsets: Mapping[str, int], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    for name, offset in offsets.items():
        shape, dtype = specs[name]
        end = offset + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
