"""What the layers and collectives of the seam give in several processes; `test_seam` judges it.

Every rank makes the same whole tensors, so each check returns what this rank got beside what it should get.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nxdi_qwen.modeling.layers.context import Way
from nxdi_qwen.modeling.layers.mlp import SparseMoE
from nxdi_qwen.modeling.parallel import (
    ColumnParallelLinear,
    ParallelLayers,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    all_gather,
    all_reduce,
    parameter_cuts,
)
from nxdi_qwen.modeling.partition import SINGLE, Cut, Parallel, even, take_part
from nxdi_qwen.modeling.presets import PRESETS

VOCABULARY, HIDDEN = 12, 8
SPARSE = dataclasses.replace(
    PRESETS["qwen3-next-80b-a3b"],
    hidden_size=16,
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=12,
)
Pair = tuple[Tensor, Tensor]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fill(module: torch.nn.Module, parallel: Parallel) -> dict[str, Tensor]:
    """Gives `module` its part of whole parameters that are the same at every degree, and returns those."""
    wholes = {}
    for seed, (name, parameter) in enumerate(module.named_parameters()):
        cuts = parameter_cuts(parameter)
        shape = list(parameter.shape)
        for cut in cuts:
            shape[cut.dim] = cut.size
        wholes[name] = normal(*shape, seed=seed) / shape[-1] ** 0.5
        parameter.data.copy_(take_part(wholes[name], cuts, parallel))
    return wholes


def _inputs(parallel: Parallel) -> list[Tensor]:
    """This rank's own: usual, a single entry, bfloat16, not contiguous, empty rows."""
    x = normal(2, 3, 4, seed=parallel.rank)
    return [x, x[0, 0, :1], x.bfloat16(), x.transpose(0, 2), x[:0]]


def fake_and_real(parallel: Parallel) -> list[tuple[Any, Any]]:
    """(shape, strides, dtype, device) of the collectives' results, real and as captured."""

    def described(x: Tensor) -> Any:
        return tuple(x.shape), x.stride(), x.dtype, x.device.type

    pairs = []
    for call in (all_reduce, all_gather):
        for x in _inputs(parallel):
            with FakeTensorMode() as mode:
                fake = call(mode.from_tensor(x), parallel)
            pairs.append((described(call(x, parallel)), described(fake)))
    return pairs


def opcheck(parallel: Parallel) -> None:
    """Torch's own checks of a custom operation; all ranks go through them in step."""
    tests = ("test_schema", "test_faketensor")
    for x in _inputs(parallel)[:4]:
        torch.library.opcheck(torch.ops.nxdi_qwen.all_reduce.default, (x,), test_utils=tests)
        torch.library.opcheck(torch.ops.nxdi_qwen.all_gather.default, (x, parallel.degree), test_utils=tests)


def sums(parallel: Parallel) -> list[Pair]:
    everyone = [Parallel(parallel.degree, rank) for rank in range(parallel.degree)]
    pairs = []
    for number, x in enumerate(_inputs(parallel)):
        before = x.clone()
        total = torch.stack([_inputs(other)[number].double() for other in everyone]).sum(dim=0)
        pairs.append((all_reduce(x, parallel).double(), total))
        assert torch.equal(x, before), "a collective must not write to its input"
    return pairs


def bfloat16_sum(parallel: Parallel) -> Tensor:
    """256 from one rank, another one for each column, and 1 from all others. Added in bfloat16, whose spacing is 2
    there, ones would be lost, in some column whatever the order.
    """
    mine = torch.ones(64, parallel.degree, dtype=torch.bfloat16)
    mine[:, parallel.rank] = 256
    return all_reduce(mine, parallel)


def gathered(parallel: Parallel) -> list[Pair]:
    everyone = [Parallel(parallel.degree, rank) for rank in range(parallel.degree)]
    return [
        (all_gather(x, parallel), torch.cat([_inputs(other)[number] for other in everyone], dim=-1))
        for number, x in enumerate(_inputs(parallel))
    ]


def embedding(parallel: Parallel) -> list[Pair]:
    """Every id; then each rank's ids while all other ranks' tables are NaN."""
    layer = VocabParallelEmbedding(VOCABULARY, HIDDEN, parallel, torch.float32)
    whole = fill(layer, parallel)["weight"]
    rank = torch.tensor([parallel.rank])
    ids = torch.tensor([[11, 0, 5, 6], [3, 3, 8, 2]])
    pairs = [(layer(ids, rank), whole[ids])]
    count = VOCABULARY // parallel.degree
    for owner in range(parallel.degree):
        fill(layer, parallel)
        if parallel.rank != owner:
            layer.weight.data.fill_(torch.nan)
        own = torch.arange(owner * count, (owner + 1) * count)
        pairs.append((layer(own, rank), whole[own]))
    return pairs


def head(parallel: Parallel) -> list[Pair]:
    """Untied and tied."""
    x = normal(2, 3, HIDDEN, seed=7)
    layer = VocabParallelHead(VOCABULARY, HIDDEN, parallel, torch.float32, tied=False)
    whole = fill(layer, parallel)["weight"]
    unused = torch.full_like(layer.weight, torch.nan)
    tied = VocabParallelHead(VOCABULARY, HIDDEN, parallel, torch.float32, tied=True)
    return [(layer(x, unused), x @ whole.T), (tied(x, layer.weight), x @ whole.T)]


def linears(parallel: Parallel) -> list[Pair]:
    """Column- then row-parallel, both with a bias: three members to a group, which two ranks cannot share evenly."""
    groups = max(1, parallel.degree // 2)
    columns, rows = Cut(0, groups, members=3, unit=2), Cut(1, groups, members=3, unit=2)
    first = ColumnParallelLinear(HIDDEN, columns, parallel, torch.float32, bias=True)
    second = RowParallelLinear(rows, HIDDEN, parallel, torch.float32, bias=True)
    one, two = fill(first, parallel), fill(second, parallel)
    x = normal(3, HIDDEN, seed=7)
    inner = torch.nn.functional.linear(x, one["weight"], one["bias"])
    pairs = [(second(first(x)), torch.nn.functional.linear(inner, two["weight"], two["bias"]))]
    plain = ColumnParallelLinear(HIDDEN, even(0, 12), parallel, torch.float32)
    whole = fill(plain, parallel)["weight"]
    return [*pairs, (all_gather(plain(x), parallel), x @ whole.T)]


def sparse_layer(parallel: Parallel) -> dict[str, Pair]:
    """The MoE layer, by tokens and by blocks, at every expert degree, against degree 1."""
    alone = SparseMoE(SPARSE, ParallelLayers(SINGLE), torch.float32)
    fill(alone, SINGLE)
    pairs = {}
    for expert_degree in (degree for degree in (1, 2, 4) if parallel.degree % degree == 0):
        place = Parallel(parallel.degree, parallel.rank, expert_degree)
        layer = SparseMoE(SPARSE, ParallelLayers(place), torch.float32)
        fill(layer, place)
        for way in (Way.PREFILL, Way.DECODE):
            x = normal(3, 7, SPARSE.hidden_size, seed=1)
            expected = alone(x, way, torch.tensor([0]))
            pairs[f"{way.value} {expert_degree}"] = (layer(x, way, torch.tensor([parallel.rank])), expected)
        partial = layer.shared_expert.partial
        layer.shared_expert.partial = lambda x, partial=partial: all_reduce(partial(x), parallel)  # type: ignore
        pairs[f"counted twice {expert_degree}"] = (layer(x, way, torch.tensor([parallel.rank])), expected)
    return pairs


CHECKS = {
    check.__name__: check
    for check in (fake_and_real, opcheck, sums, bfloat16_sum, gathered, embedding, head, linears, sparse_layer)
}
