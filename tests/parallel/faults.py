"""Mistakes at the seam, planted within the processes: each must move the logits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple
from unittest import mock

from torch import Tensor
from torch.nn import functional

from nxdi_qwen.modeling import parallel as seam
from nxdi_qwen.modeling.layers.mlp import SparseMoE
from nxdi_qwen.modeling.model import HybridCausalLM
from nxdi_qwen.modeling.parallel import VocabParallelEmbedding, all_reduce, parameter_cuts
from nxdi_qwen.modeling.partition import Cut, Over, Parallel, Part


class Case(NamedTuple):
    """A checkpoint folder below the job's, and how its experts are cut."""

    name: str
    expert_degree: int = 1


@dataclass(frozen=True)
class Planted:
    """`loading` stands while a model is built and its weights are cut, `running` changes it afterwards."""

    degree: int
    case: Case
    loading: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    running: Callable[[HybridCausalLM, Parallel], AbstractContextManager[object]] = lambda model, parallel: (
        contextlib.nullcontext()
    )


@contextlib.contextmanager
def _unsummed_attention(model: HybridCausalLM, parallel: Parallel) -> Iterator[None]:
    out = model.layers[1].self_attn.o_proj
    with mock.patch.object(out, "forward", out.partial):
        yield


@contextlib.contextmanager
def _unsummed_mlp(model: HybridCausalLM, parallel: Parallel) -> Iterator[None]:
    with mock.patch.object(model.layers[0].mlp, "forward", model.layers[0].mlp.partial):
        yield


@contextlib.contextmanager
def _bias_of_every_rank(model: HybridCausalLM, parallel: Parallel) -> Iterator[None]:
    out = model.layers[1].self_attn.o_proj
    with mock.patch.object(out, "forward", lambda x: all_reduce(out.partial(x) + out.bias, parallel)):
        yield


@contextlib.contextmanager
def _shared_expert_of_every_rank(model: HybridCausalLM, parallel: Parallel) -> Iterator[None]:
    def summed(partial: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: all_reduce(partial(x), parallel)

    with contextlib.ExitStack() as stack:
        for layer in model.layers:
            if isinstance(layer.mlp, SparseMoE):
                expert = layer.mlp.shared_expert
                stack.enter_context(mock.patch.object(expert, "partial", summed(expert.partial)))
        yield


@contextlib.contextmanager
def _clamped_embedding(model: HybridCausalLM, parallel: Parallel) -> Iterator[None]:
    def forward(self: VocabParallelEmbedding, ids: Tensor, rank: Tensor) -> Tensor:
        count = self.weight.shape[0]
        return all_reduce(functional.embedding((ids - rank * count).clamp(0, count - 1), self.weight), parallel)

    with mock.patch.object(VocabParallelEmbedding, "forward", forward):
        yield


@contextlib.contextmanager
def _reversed_gather(model: HybridCausalLM, parallel: Parallel) -> Iterator[None]:
    gather = seam.all_gather

    def reversed_gather(x: Tensor, parallel: Parallel) -> Tensor:
        parts = gather(x, parallel).unflatten(-1, (parallel.degree, -1))
        return parts.flip(-2).flatten(-2)

    with mock.patch.object(seam, "all_gather", reversed_gather):
        yield


@contextlib.contextmanager
def _filling_repeats(model: HybridCausalLM, parallel: Parallel) -> Iterator[None]:
    """In place of zeros stands the first of the rank's own heads once more."""
    for parameter in model.parameters():
        for cut in parameter_cuts(parameter):
            part = cut.part(parallel)
            own = part.stop - part.start
            if 0 < own < part.size:
                filling = parameter.data.narrow(cut.dim, own, part.size - own)
                filling.copy_(parameter.data.narrow(cut.dim, 0, part.size - own))
    yield


def _expert_groups_in_turns() -> AbstractContextManager[object]:
    place = Parallel.place

    def alternating(self: Parallel, over: Over) -> tuple[int, int]:
        if over is Over.EXPERT:
            return self.expert_degree, self.rank % self.expert_degree
        return place(self, over)

    return mock.patch.object(Parallel, "place", alternating)


def _members_across_groups() -> AbstractContextManager[object]:
    """All value heads (and query heads) are dealt out contiguously, whatever group they belong to."""
    part = Cut.part

    def contiguous(self: Cut, parallel: Parallel) -> Part:
        ranks, rank = parallel.place(self.over)
        if self.shared or self.groups % ranks == 0:
            return part(self, parallel)
        heads = self.groups * self.members
        each = -(-heads // ranks)
        start, stop = (min((rank + n) * each, heads) for n in (0, 1))
        return Part(start * self.unit, stop * self.unit, each * self.unit)

    return mock.patch.object(Cut, "part", contiguous)


def _groups_in_turns() -> AbstractContextManager[object]:
    """Neighbouring ranks get the key and KV heads of different groups."""
    part = Cut.part

    def alternating(self: Cut, parallel: Parallel) -> Part:
        ranks, rank = parallel.place(self.over)
        if not self.shared or self.groups % ranks == 0:
            return part(self, parallel)
        size = self.members * self.unit
        first = rank % self.groups * size
        return Part(first, first + size, size)

    return mock.patch.object(Cut, "part", alternating)


FAULTS = {
    "one attention layer is not summed": Planted(2, Case("qwen3_next"), running=_unsummed_attention),
    "one dense layer is not summed": Planted(2, Case("qwen3_5"), running=_unsummed_mlp),
    "every rank adds the bias": Planted(2, Case("qwen3_5_bias"), running=_bias_of_every_rank),
    "every rank adds the shared expert": Planted(2, Case("qwen3_5_moe"), running=_shared_expert_of_every_rank),
    "foreign ids are clamped only": Planted(2, Case("qwen3_5_tied"), running=_clamped_embedding),
    "the logits are gathered in reverse": Planted(2, Case("qwen3_5_tied"), running=_reversed_gather),
    "the filling is not zero": Planted(4, Case("qwen3_5"), running=_filling_repeats),
    "the expert groups alternate": Planted(4, Case("qwen3_5_moe", 2), loading=_expert_groups_in_turns),
    "value heads are cut across groups": Planted(4, Case("qwen3_next_mixed"), loading=_members_across_groups),
    "key heads alternate": Planted(4, Case("qwen3_next"), loading=_groups_in_turns),
}
