"""Blocks: weights on their way, a few rows at a time, so that neither a tensor nor a rank need fit into memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.partition import SINGLE, Cut, Parallel, take_part
from nxdi_qwen.modeling.weights.layout import Shape, derived_buffers, weight_cuts, weight_shapes, weight_specs

BLOCK_BYTES = 32 << 20  # in float32, the widest form on the way


@dataclass(frozen=True)
class Block:
    """Some rows of a parameter, with all of their columns.

    `data` has the parameter's dtype and as many dimensions, and stands at `start`: (row,), or (expert, row) of stacked
    experts [E, rows, columns], of which it is a single one.
    """

    name: str
    start: tuple[int, ...]
    data: torch.Tensor


def rows_in_block(shape: Shape, multiple: int = 1) -> int:
    """How many rows of a tensor of `shape` make a block: a multiple of `multiple`, and at least that."""
    rows = BLOCK_BYTES // (4 * math.prod(shape[1:]))
    return max(rows // multiple, 1) * multiple


def share(block: Block, cuts: tuple[Cut, ...], parallel: Parallel) -> Block | None:
    """The part of `block` that a rank owns, placed within the rank's part of the parameter; None where there is none.

    Rows that only fill up the rank's part belong to no block: they are the zeros that are there before.
    """
    start, data = list(block.start), block.data
    for cut in cuts:
        if cut.dim == len(start):  # the columns
            data = take_part(data, (cut,), parallel)
            continue
        part, first = cut.part(parallel), start[cut.dim]
        low, high = max(first, part.start), min(first + data.shape[cut.dim], part.stop)
        if low >= high:
            return None
        data = data.narrow(cut.dim, low - first, high - low)
        start[cut.dim] = low - part.start
    return Block(block.name, tuple(start), data)


class Account:
    """What has arrived of each parameter. Raises ValueError for a block that no parameter has a place for."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        derived = derived_buffers(config, SINGLE)
        specs = weight_specs(config, dtype)
        self._dtypes = {name: kept for name, (_, kept) in specs.items() if name not in derived}
        self._missing = Counter({n: math.prod(s) for n, s in weight_shapes(config).items() if n not in derived})
        self.total = sum(self._missing[name] * kept.itemsize for name, kept in self._dtypes.items())
        self.done = 0

    def take(self, block: Block) -> None:
        """Notes that `block` arrived; `done` of `total` bytes have then."""
        data = block.data
        if self._dtypes.get(block.name) != data.dtype or self._missing[block.name] < data.numel():
            raise ValueError(f"{block.name} [{tuple(data.shape)}, {data.dtype}] was not asked for")
        self._missing[block.name] -= data.numel()
        self.done += data.nbytes

    def lacks(self, name: str) -> bool:
        """Whether part of a parameter has still to arrive."""
        return self._missing[name] > 0

    def check_complete(self) -> None:
        """Raises ValueError where something did not arrive."""
        if missing := [name for name in self._dtypes if self.lacks(name)]:
            raise ValueError(f"{len(missing)} tensors did not arrive: {missing[0]} ...")


def collect(
    blocks: Iterable[Block], config: ModelConfig, dtype: torch.dtype, parallel: Parallel = SINGLE
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a rank's (name, tensor) in the order of `weight_specs(config, dtype, parallel)`.

    Tensors are contiguous and own their memory. Beside the one to come, only those whose rows arrive together with its
    own are held (a layer's gate and up experts are the largest). Raises ValueError where one does not arrive whole.
    """
    account, cuts, arriving = Account(config, dtype), weight_cuts(config, parallel), iter(blocks)
    specs, derived = weight_specs(config, dtype, parallel), derived_buffers(config, parallel)
    ready: dict[str, torch.Tensor] = {}
    for name in specs:
        while account.lacks(name):
            block = next(arriving, None)
            if block is None:
                account.check_complete()
                break
            account.take(block)
            if block.name not in ready:
                shape, kept = specs[block.name]
                ready[block.name] = torch.zeros(shape, dtype=kept)
            own = share(block, cuts[block.name], parallel)
            if own is not None:
                place = ready[block.name]
                for dim, start in enumerate(own.start):
                    place = place.narrow(dim, start, own.data.shape[dim])
                place.copy_(own.data)
        yield name, derived[name] if name in derived else ready.pop(name)
