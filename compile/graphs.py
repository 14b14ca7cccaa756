"""Capturing graphs: weights and state are inputs, so weights stand once beside all graphs and the state is explicit.

A pass through the model is cut into parts: the embedding, a graph for each kind of layer, which all layers of that
kind share, and the logits. So a model of 64 layers has as many graphs as one of 4, and each is captured, checked,
compiled and loaded once. A context graph encodes prompts from their first token; for what follows a prompt's first
piece, layers with attention have another one, which looks at the whole cache. Every graph takes ``(weights, *inputs,
state)``; `weights` is a list in the order of `graph_weights`, `state` the list of a layer's two tensors, which other
parts do not have. (Lists, because torch.export tells the entries of a dictionary apart by their order alone.)
Captured from fake tensors: no weight is allocated.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.func import functional_call

from nxdi_qwen.compile.buckets import Buckets
from nxdi_qwen.modeling.config import FULL_ATTENTION, ModelConfig
from nxdi_qwen.modeling.layers.context import Context, Way
from nxdi_qwen.modeling.model import HybridCausalLM, State, run_layer, take_last, valid_first
from nxdi_qwen.modeling.partition import SINGLE, Parallel
from nxdi_qwen.modeling.state import StateDescription, StateTensor
from nxdi_qwen.modeling.weights import weight_shapes
from nxdi_qwen.modeling.weights.layout import RANK, ROPE

CONTEXT = "context"
CONTINUATION = "continuation"
DECODE = "decode"
HEAD = "head"
# Parts of context encoding and token generation beside the layers.
EMBED = "embed"
LOGITS = "logits"
# Rows of hidden states that the head graph turns into logits at a time.
HEAD_ROWS = 64


@dataclass(frozen=True)
class GraphSpec:
    """One graph: its kind, its static rows and tokens, and the part of the pass: EMBED, LOGITS, or the kind of layer
    (see `layer_kind`); a HEAD has no parts.
    """

    kind: str
    rows: int
    tokens: int
    part: str = ""

    @property
    def name(self) -> str:
        whole = f"{self.kind}_{self.tokens}" if self.kind in (CONTEXT, CONTINUATION) else self.kind
        return f"{whole}.{self.part}" if self.part else whole


def layer_kind(config: ModelConfig, layer: int) -> str:
    """What layers of one graph have in common, for example "linear_attention_dense"."""
    return f"{config.layer_types[layer]}_{'moe' if config.moe_layers[layer] else 'dense'}"


def pass_specs(config: ModelConfig, kind: str, rows: int, tokens: int) -> list[GraphSpec]:
    """The graphs of one pass of a CONTEXT or DECODE, in the order of their first use; of a CONTINUATION, those that
    take the place of a CONTEXT's.
    """
    layers = range(config.num_hidden_layers)
    parts: list[str]
    if kind == CONTINUATION:
        parts = [layer_kind(config, layer) for layer in layers if continues_apart(config, layer)]
    else:
        parts = [EMBED, *(layer_kind(config, layer) for layer in layers), LOGITS]
    return [GraphSpec(kind, rows, tokens, part) for part in dict.fromkeys(parts)]


def continues_apart(config: ModelConfig, layer: int) -> bool:
    """Whether the layer's graph of a CONTINUATION is not that of a CONTEXT: only attention looks further back than a
    state of constant size.
    """
    return config.layer_types[layer] == FULL_ATTENTION


def graph_specs(config: ModelConfig, buckets: Buckets, slots: int, max_length: int) -> list[GraphSpec]:
    """The graphs of an artifact: context encoding a bucket, one row each; token generation over all slots; the
    head alone.
    """
    kinds = (CONTEXT, CONTINUATION) if buckets.cuts_prompts(max_length) else (CONTEXT,)
    contexts = [spec for length in buckets.lengths for kind in kinds for spec in pass_specs(config, kind, 1, length)]
    return [*contexts, *pass_specs(config, DECODE, slots, 1), GraphSpec(HEAD, HEAD_ROWS, 1)]


class _Embed(nn.Module):
    """-> x [B, T, H], cos and sin [B, T, rotary_dim / 2], valid tokens a row [B]; in context encoding valid tokens are
    brought to the front, and `order` [B, T] says which they were.
    """

    def __init__(self, model: HybridCausalLM, spec: GraphSpec) -> None:
        super().__init__()
        self.embed_tokens, self.rope = model.embed_tokens, model.rope
        self.rank: Tensor
        self.register_buffer("rank", model.rank)
        self.kind = spec.kind

    def forward(self, input_ids: Tensor, valid: Tensor, rope_positions: Tensor) -> tuple[Tensor, ...]:
        order: tuple[Tensor, ...] = ()
        if self.kind == CONTEXT:
            input_ids, rope_positions, taken = valid_first(input_ids, valid, rope_positions)
            order = (taken,)
        cos, sin = self.rope(rope_positions)
        return self.embed_tokens(input_ids, self.rank), cos, sin, valid.sum(dim=1), *order


class _Layer(nn.Module):
    """-> x [B, T, H], the layer's new state."""

    def __init__(self, model: HybridCausalLM, spec: GraphSpec) -> None:
        super().__init__()
        example = _example_layer(spec, model.config)
        assert example is not None, spec.name
        self.layer = model.layers[example]
        self.rank: Tensor
        self.register_buffer("rank", model.rank)
        self.way, self.tokens = Way.DECODE if spec.kind == DECODE else Way.PREFILL, spec.tokens
        # Of the layers that have no graph of a continuation, this one serves both.
        self.fresh = spec.kind == CONTEXT and continues_apart(model.config, example)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, start: Tensor, lengths: Tensor, *slots_and_state: Any
    ) -> tuple[Tensor, State]:
        *slots, state = slots_and_state  # slots [B] in context encoding only
        context = Context(self.way, start, lengths, cos, sin, (self.tokens,), self.rank, self.fresh)
        x, states = run_layer(self.layer, x, state, context, *(slots or [None]))
        return x, states[0]


class _Logits(nn.Module):
    """-> logits [B, V], and in context encoding what the head reads, [B, T, H], in the order of the input."""

    def __init__(self, model: HybridCausalLM, spec: GraphSpec) -> None:
        super().__init__()
        self.norm, self.embed_tokens, self.lm_head = model.norm, model.embed_tokens, model.lm_head
        self.kind = spec.kind

    def forward(self, x: Tensor, *lengths_and_order: Tensor) -> tuple[Tensor, ...]:
        hidden = self.norm(x)
        if self.kind == DECODE:
            return (self.lm_head(hidden[:, 0], self.embed_tokens.weight),)
        last, hidden = take_last(hidden, *lengths_and_order)
        return self.lm_head(last, self.embed_tokens.weight), hidden


class _Head(nn.Module):
    """hidden [N, H] -> logits [N, V]."""

    def __init__(self, model: HybridCausalLM, spec: GraphSpec) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head = model.embed_tokens, model.lm_head

    def forward(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden, self.embed_tokens.weight)


class _WithWeights(nn.Module):
    """`inner` with its parameters taken from an argument instead of from itself."""

    inner: nn.Module

    def __init__(self, inner: nn.Module, names: list[str]) -> None:
        super().__init__()
        # Hidden from nn.Module: a registered parameter would become a constant of the graph.
        object.__setattr__(self, "inner", inner)
        self.names = names

    def forward(self, weights: list[Tensor], *inputs: Tensor | State) -> object:
        return functional_call(self.inner, dict(zip(self.names, weights, strict=True)), inputs)


def graph_weights(spec: GraphSpec, config: ModelConfig, layer: int | None = None) -> list[str]:
    """The names of the weights that a graph takes, in order; `layer` is the one that a layer's graph is to run."""
    head = "embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    if spec.kind == HEAD:
        return [head]
    if spec.part == LOGITS:
        return ["norm.weight", head]
    if spec.part == EMBED:
        return [RANK, "embed_tokens.weight", ROPE]
    return [RANK, *(name for name in weight_shapes(config) if name.startswith(f"layers.{layer}."))]


def graph_state(spec: GraphSpec, config: ModelConfig, description: StateDescription) -> tuple[StateTensor, ...]:
    """The tensors of the state that a graph takes and returns; a layer's graph names those of the first of its kind."""
    layer = _example_layer(spec, config)
    return tuple(tensor for tensor in description.tensors if tensor.layer == layer)


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
    layer = _example_layer(spec, config)
    names = graph_weights(spec, config, layer)
    fake = FakeTensorMode()
    with fake, torch.no_grad():
        model = HybridCausalLM(config, dtype, parallel)
        tensors = model.state_dict()
        weights = [tensors[name].detach() for name in names]
        parts: dict[str, type[nn.Module]] = {"": _Head, EMBED: _Embed, LOGITS: _Logits}
        inner = parts.get(spec.part, _Layer)(model, spec)
        inputs = _example_inputs(spec, config, dtype, description)
    own = [name.replace(f"layers.{layer}.", "layer.", 1) for name in names]
    with torch.no_grad(), quiet_export():
        return torch.export.export(_WithWeights(inner, own), (weights, *inputs), strict=False)


def _example_layer(spec: GraphSpec, config: ModelConfig) -> int | None:
    """The first layer of the kind that a layer's graph is for; None for a graph that is no layer's."""
    return next((layer for layer in range(config.num_hidden_layers) if layer_kind(config, layer) == spec.part), None)


def _example_inputs(
    spec: GraphSpec, config: ModelConfig, dtype: torch.dtype, description: StateDescription
) -> tuple[Tensor | State, ...]:
    """Zeros in the graph's shapes."""
    if spec.kind == HEAD:
        return (torch.zeros(spec.rows, config.hidden_size, dtype=dtype),)
    shape = (spec.rows, spec.tokens)
    integers, per_row = torch.zeros(shape, dtype=torch.int64), torch.zeros(spec.rows, dtype=torch.int64)
    x = torch.zeros(*shape, config.hidden_size, dtype=dtype)
    if spec.part == EMBED:
        return integers, torch.zeros(shape, dtype=torch.bool), torch.zeros(3, *shape, dtype=torch.int64)
    if spec.part == LOGITS:
        return (x, per_row, integers) if spec.kind == CONTEXT else (x,)
    cos, sin = (torch.zeros(*shape, config.rotary_dim // 2) for _ in range(2))
    slots = [] if spec.kind == DECODE else [per_row.clone()]
    state = [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in graph_state(spec, config, description)]
    return (x, cos, sin, per_row, per_row.clone(), *slots, state)
