"""Capturing graphs: weights and state are inputs, so weights stand once beside all graphs and the state is explicit.

Every graph takes ``(weights, *inputs, state)``; `weights` is a list in the order of `graph_weights`, `state` the list
that `modeling.state` describes. (Lists, because torch.export tells the entries of a dictionary apart by their order
alone.) Captured from fake tensors: no weight is allocated.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.func import functional_call

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.model import Batch, HybridCausalLM, State
from nxdi_qwen.modeling.partition import SINGLE, Parallel
from nxdi_qwen.modeling.state import StateDescription
from nxdi_qwen.modeling.weights import weight_shapes

CONTEXT = "context"
DECODE = "decode"
HEAD = "head"
# Rows of hidden states that the head graph turns into logits at a time.
HEAD_ROWS = 64


@dataclass(frozen=True)
class GraphSpec:
    """One graph: its kind, and its static rows and tokens."""

    kind: str
    rows: int
    tokens: int

    @property
    def name(self) -> str:
        return f"{CONTEXT}_{self.tokens}" if self.kind == CONTEXT else self.kind


def graph_specs(buckets: tuple[int, ...], slots: int) -> list[GraphSpec]:
    """The graphs of an artifact: context encoding a bucket, one row each; token generation over all slots; the
    head alone.
    """
    contexts = [GraphSpec(CONTEXT, 1, length) for length in buckets]
    return [*contexts, GraphSpec(DECODE, slots, 1), GraphSpec(HEAD, HEAD_ROWS, 1)]


class _Context(nn.Module):
    """-> logits [B, V], hidden [B, T, H], new state."""

    def __init__(self, model: HybridCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, valid: Tensor, rope_positions: Tensor, start: Tensor, slots: Tensor, state: State
    ) -> tuple[Tensor, Tensor, State]:
        out = self.model.prefill(Batch(input_ids, valid, rope_positions, start, slots), state)
        return out.logits, out.hidden, out.state


class _Decode(nn.Module):
    """Row i is slot i -> logits [S, V], new state."""

    def __init__(self, model: HybridCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, valid: Tensor, rope_positions: Tensor, start: Tensor, state: State
    ) -> tuple[Tensor, State]:
        return self.model.decode(Batch(input_ids, valid, rope_positions, start, None), state)


class _Head(nn.Module):
    """hidden [N, H] -> logits [N, V]."""

    def __init__(self, model: HybridCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, hidden: Tensor) -> Tensor:
        return self.model.head(hidden)


class _WithWeights(nn.Module):
    """`inner` with its parameters taken from an argument instead of from itself."""

    inner: nn.Module

    def __init__(self, inner: nn.Module, names: list[str]) -> None:
        super().__init__()
        # Hidden from nn.Module: a registered parameter would become a constant of the graph.
        object.__setattr__(self, "inner", inner)
        self.names = [f"model.{name}" for name in names]

    def forward(self, weights: list[Tensor], *inputs: Tensor | State) -> object:
        return functional_call(self.inner, dict(zip(self.names, weights, strict=True)), inputs)


def graph_weights(kind: str, config: ModelConfig) -> list[str]:
    """The names of the weights that a graph takes, in order; the head reads one tensor, all others take everything."""
    if kind == HEAD:
        return ["embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return list(weight_shapes(config))


@contextmanager
def quiet_export() -> Iterator[None]:
    """Hides the deprecation warnings that torch.export causes within torch itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def capture(
    spec: GraphSpec,
    config: ModelConfig,
    dtype: torch.dtype,
    description: StateDescription,
    parallel: Parallel = SINGLE,
) -> ExportedProgram:
    """The graph of `spec` as an exported program; `dtype` is the model's, `description` that of one rank.

    Every rank of a degree has the same graph, whatever rank `parallel` names.
    """
    fake = FakeTensorMode()
    with fake, torch.no_grad():
        model = HybridCausalLM(config, dtype, parallel)
        names = graph_weights(spec.kind, config)
        tensors = model.state_dict()
        weights = [tensors[name].detach() for name in names]
        inner: nn.Module = {CONTEXT: _Context, DECODE: _Decode, HEAD: _Head}[spec.kind](model)
        inputs = _example_inputs(spec, config, dtype, description)
    with torch.no_grad(), quiet_export():
        return torch.export.export(_WithWeights(inner, names), (weights, *inputs), strict=False)


def _example_inputs(
    spec: GraphSpec, config: ModelConfig, dtype: torch.dtype, description: StateDescription
) -> tuple[Tensor | State, ...]:
    """Zeros in the graph's shapes."""
    if spec.kind == HEAD:
        return (torch.zeros(spec.rows, config.hidden_size, dtype=dtype),)
    shape = (spec.rows, spec.tokens)
    per_row = torch.zeros(spec.rows, dtype=torch.int64)
    inputs: list[Tensor | State] = [
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(shape, dtype=torch.bool),
        torch.zeros(3, *shape, dtype=torch.int64),
        per_row,
    ]
    if spec.kind == CONTEXT:
        inputs.append(per_row.clone())
    return (*inputs, description.allocate())
