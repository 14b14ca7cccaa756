"""The seam for parallelism: the only place that knows how parameters are cut and how ranks talk.

The cutting rule: a parameter has one `partition_dim` (or none: replicated), and rank r of N owns the r-th of N equal
contiguous slices along it. Every parameter stands in an order in which that slice is the right one: heads are the
outer index of every projection, fused projections of a checkpoint are stored apart (q, k, v, z, b, a; q, k and v
convolution; gate and up), and value heads of one key head are neighbours. Degree 1 is the only degree that is written
so far.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from nxdi_qwen.modeling.errors import InputError


@dataclass(frozen=True)
class Parallel:
    """Where this process stands: `rank` of `degree` tensor-parallel ranks."""

    degree: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if self.degree != 1:
            raise InputError(f"degree {self.degree} is not supported yet: use degree 1")
        if not 0 <= self.rank < self.degree:
            raise InputError(f"rank {self.rank} does not exist at degree {self.degree}")

    def local(self, size: int) -> int:
        """This rank's share of `size` heads, columns or experts."""
        if size % self.degree:
            raise InputError(f"{size} does not divide into {self.degree} ranks")
        return size // self.degree


SINGLE = Parallel()


def partition(shape: tuple[int, ...], dim: int | None, parallel: Parallel, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter: this rank's slice of the full `shape` along `dim` (None: replicated)."""
    local = list(shape)
    if dim is not None:
        local[dim] = parallel.local(shape[dim])
    parameter = nn.Parameter(torch.empty(local, dtype=dtype), requires_grad=False)
    return with_partition_dim(parameter, dim)


def with_partition_dim(parameter: nn.Parameter, dim: int | None) -> nn.Parameter:
    """Marks along which dimension a parameter is cut; `partition_dim` reads it."""
    parameter.partition_dim = dim  # type: ignore[attr-defined]
    return parameter


def partition_dim(parameter: nn.Parameter) -> int | None:
    """The dimension along which a parameter is cut, None where it is replicated."""
    dim: int | None = parameter.partition_dim  # type: ignore[attr-defined]
    return dim


def all_reduce(x: Tensor, parallel: Parallel) -> Tensor:
    """The sum of `x` over all ranks."""
    assert parallel.degree == 1
    return x


def all_gather(x: Tensor, dim: int, parallel: Parallel) -> Tensor:
    """The ranks' `x` one after the other along `dim`."""
    assert parallel.degree == 1
    return x


class ColumnParallelLinear(nn.Module):
    """Linear layer whose outputs are cut: x [..., in] -> [..., out / degree]."""

    def __init__(
        self, in_features: int, out_features: int, parallel: Parallel, dtype: torch.dtype, bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = partition((out_features, in_features), 0, parallel, dtype)
        self.bias = partition((out_features,), 0, parallel, dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Linear layer whose inputs are cut: x [..., in / degree] -> [..., out], summed over the ranks; the bias is
    added once.
    """

    def __init__(
        self, in_features: int, out_features: int, parallel: Parallel, dtype: torch.dtype, bias: bool = False
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.weight = partition((out_features, in_features), 1, parallel, dtype)
        self.bias = partition((out_features,), None, parallel, dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        out = all_reduce(functional.linear(x, self.weight), self.parallel)
        return out if self.bias is None else out + self.bias


class VocabParallelEmbedding(nn.Module):
    """Embedding cut by vocabulary: ids [...] int64 -> [..., H]."""

    def __init__(self, vocab_size: int, hidden_size: int, parallel: Parallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.parallel = parallel
        self.weight = partition((vocab_size, hidden_size), 0, parallel, dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return all_reduce(functional.embedding(ids, self.weight), self.parallel)


class VocabParallelHead(nn.Module):
    """Language-model head cut by vocabulary: x [..., H] -> logits [..., V] of all ranks, in the dtype of `x`.

    A tied model passes the embedding's weight to `forward`; the head then has none of its own.
    """

    def __init__(self, vocab_size: int, hidden_size: int, parallel: Parallel, dtype: torch.dtype, tied: bool) -> None:
        super().__init__()
        self.parallel = parallel
        self.weight = None if tied else partition((vocab_size, hidden_size), 0, parallel, dtype)

    def forward(self, x: Tensor, embedding_weight: Tensor) -> Tensor:
        weight = embedding_weight if self.weight is None else self.weight
        return all_gather(functional.linear(x, weight), -1, self.parallel)
