"""The seam for parallelism: the layers whose parameters are cut, and the collectives between ranks.

Everything else is written once, for the part that a rank owns; `partition` holds the rule that says which part that is.
The collectives are operations of their own, so that a captured graph holds them as single nodes and is the same for
every rank: where a rank's place matters, it is an input, the buffer `rank`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Functions there have the process group of the moment as a default argument. Imported later, as the first operation
# below does, they would hold it for ever, and gloo's threads, still alive, abort some processes as they exit.
import torch.distributed.nn
from torch import Tensor, distributed, nn
from torch.nn import functional

from nxdi_qwen.modeling.partition import Cut, Parallel, even, local_shape


@torch.library.custom_op("nxdi_qwen::all_reduce", mutates_args=())
def _all_reduce(x: Tensor) -> Tensor:
    """Sum over all ranks, in float32; contiguous, as NCCL wants it."""
    total = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    distributed.all_reduce(total)
    return total.to(x.dtype)


@_all_reduce.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("nxdi_qwen::all_gather", mutates_args=())
def _all_gather(x: Tensor, degree: int) -> Tensor:
    """The ranks' `x` [..., n] side by side: [..., degree * n]."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(degree)]
    distributed.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim=-1)


@_all_gather.register_fake
def _(x: Tensor, degree: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] * degree))


def all_reduce(x: Tensor, parallel: Parallel) -> Tensor:
    """The sum of `x` over all ranks, in the dtype of `x`."""
    return x if parallel.degree == 1 else _all_reduce(x)


def all_gather(x: Tensor, parallel: Parallel) -> Tensor:
    """The ranks' `x` one after the other along the last dimension."""
    return x if parallel.degree == 1 else _all_gather(x, parallel.degree)


def partition(shape: Sequence[int], cuts: Sequence[Cut], parallel: Parallel, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter: this rank's part of the full `shape` (no cuts: replicated)."""
    parameter = nn.Parameter(torch.empty(local_shape(shape, cuts, parallel), dtype=dtype), requires_grad=False)
    return with_cuts(parameter, cuts) if cuts else parameter


def with_cuts(parameter: nn.Parameter, cuts: Sequence[Cut]) -> nn.Parameter:
    """Marks how a parameter is cut; `parameter_cuts` reads it."""
    parameter.cuts = tuple(cuts)  # type: ignore[attr-defined]
    return parameter


def parameter_cuts(parameter: nn.Parameter) -> tuple[Cut, ...]:
    """How a parameter is cut; empty where every rank holds all of it."""
    return getattr(parameter, "cuts", ())


class ColumnParallelLinear(nn.Module):
    """Linear layer whose outputs are cut: x [..., in] -> [..., this rank's part of out]. `cut` is along dimension 0."""

    def __init__(self, in_features: int, cut: Cut, parallel: Parallel, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__()
        self.weight = partition((cut.size, in_features), (cut,), parallel, dtype)
        self.bias = partition((cut.size,), (cut,), parallel, dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Linear layer whose inputs are cut: x [..., this rank's part of in] -> [..., out], summed over the ranks.

    `cut` is along dimension 1; the bias is added once.
    """

    def __init__(self, cut: Cut, out_features: int, parallel: Parallel, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__()
        self.parallel = parallel
        self.weight = partition((out_features, cut.size), (cut,), parallel, dtype)
        self.bias = partition((out_features,), (), parallel, dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        out = all_reduce(self.partial(x), self.parallel)
        return out if self.bias is None else out + self.bias

    def partial(self, x: Tensor) -> Tensor:
        """This rank's share of the sum, without the bias: for callers that add more to it before the ranks meet."""
        return functional.linear(x, self.weight)


class PartitionedWeight(nn.Module):
    """A parameter `weight` that is cut and belongs to no matrix product."""

    def __init__(self, shape: Sequence[int], cut: Cut, parallel: Parallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = partition(shape, (cut,), parallel, dtype)


class ParallelLayers:
    """Makes one rank's layers whose parameters are cut, over `torch.distributed`.

    The layers of a model ask it for theirs, so a port makes them of its platform's own by overriding these methods:
    same arguments, same parts of the checkpoint.
    """

    def __init__(self, parallel: Parallel) -> None:
        self.parallel = parallel

    def column(self, in_features: int, cut: Cut, dtype: torch.dtype, bias: bool = False) -> nn.Module:
        """[..., in] -> [..., this rank's part of out]; see `ColumnParallelLinear`."""
        return ColumnParallelLinear(in_features, cut, self.parallel, dtype, bias)

    def row(self, cut: Cut, out_features: int, dtype: torch.dtype, bias: bool = False) -> RowParallelLinear:
        """[..., this rank's part of in] -> [..., out], with the method `partial`; see `RowParallelLinear`."""
        return RowParallelLinear(cut, out_features, self.parallel, dtype, bias)

    def weight(self, shape: Sequence[int], cut: Cut, dtype: torch.dtype) -> PartitionedWeight:
        """A module that holds a parameter `weight`; see `PartitionedWeight`."""
        return PartitionedWeight(shape, cut, self.parallel, dtype)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of `x` over all ranks, in the dtype of `x`."""
        return all_reduce(x, self.parallel)


class VocabParallelEmbedding(nn.Module):
    """Embedding cut by vocabulary: ids [...] int64 -> [..., H]; `rank` is this rank's number, [1] int64."""

    def __init__(self, vocab_size: int, hidden_size: int, parallel: Parallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.parallel = parallel
        self.weight = partition((vocab_size, hidden_size), (even(0, vocab_size),), parallel, dtype)

    def forward(self, ids: Tensor, rank: Tensor) -> Tensor:
        if self.parallel.degree == 1:
            return functional.embedding(ids, self.weight)
        count = self.weight.shape[0]
        local = ids - rank * count
        own = local.clamp(0, count - 1)
        rows = functional.embedding(own, self.weight)
        return all_reduce(torch.where((own == local)[..., None], rows, 0.0), self.parallel)


class VocabParallelHead(nn.Module):
    """Language-model head cut by vocabulary: x [..., H] -> logits [..., V] of all ranks, in the dtype of `x`.

    A tied model passes the embedding's weight to `forward`; the head then has none of its own.
    """

    def __init__(self, vocab_size: int, hidden_size: int, parallel: Parallel, dtype: torch.dtype, tied: bool) -> None:
        super().__init__()
        self.parallel = parallel
        cuts = (even(0, vocab_size),)
        self.weight = None if tied else partition((vocab_size, hidden_size), cuts, parallel, dtype)

    def forward(self, x: Tensor, embedding_weight: Tensor) -> Tensor:
        weight = embedding_weight if self.weight is None else self.weight
        return all_gather(functional.linear(x, weight), self.parallel)
