"""The text model of the whole family: embedding, hybrid layers, head, with the state as input and output."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nxdi_qwen.modeling.config import FULL_ATTENTION, ModelConfig
from nxdi_qwen.modeling.layers.attention import GatedAttention
from nxdi_qwen.modeling.layers.context import Context, LayerState, Way
from nxdi_qwen.modeling.layers.gated_delta_net import GatedDeltaNet
from nxdi_qwen.modeling.layers.mlp import SparseMoE, SwiGLU
from nxdi_qwen.modeling.layers.norm import ZeroCenteredRMSNorm
from nxdi_qwen.modeling.ops.gated_delta import CHUNK
from nxdi_qwen.modeling.ops.rotary import rotary_cos_sin
from nxdi_qwen.modeling.ops.tokens import take_tokens
from nxdi_qwen.modeling.parallel import ParallelLayers, VocabParallelEmbedding, VocabParallelHead
from nxdi_qwen.modeling.partition import SINGLE, Parallel, check_degree
from nxdi_qwen.modeling.rope_frequencies import rope_attention_scaling, rope_inv_freq
from nxdi_qwen.modeling.state import read_slots, write_slots

State = list[Tensor]


class Batch(NamedTuple):
    """The inputs of one forward pass over B rows of T tokens, beside the state.

    Invalid positions of `valid` may stand anywhere in a row, and a row without a valid token is idle: its slot keeps
    what it holds. `start` and a row's valid tokens together fit the slot: more would be left out of the cache.
    """

    input_ids: Tensor  # [B, T] int64; padding holds any id of the vocabulary
    valid: Tensor  # [B, T] bool
    rope_positions: Tensor  # [3, B, T] int64: time, height, width; equal for text
    start: Tensor  # [B] int64: tokens that the row's slot already holds; 0 starts the slot afresh
    slots: Tensor | None  # [B] int64, distinct among active rows; None: row i is slot i


class PrefillOutput(NamedTuple):
    """`logits` [B, V] after each row's last valid token; `hidden` [B, T, H], what the head reads, for every token
    in the order given.
    """

    logits: Tensor
    hidden: Tensor
    state: State
    checkpoints: list[State]


def text_positions(start: Tensor, valid: Tensor) -> Tensor:
    """Rotary positions [3, B, T] of text: a row's valid tokens count on from `start` [B]."""
    position = start[:, None] + valid.to(torch.int64).cumsum(dim=1) - 1
    return position.clamp(min=0).expand(3, -1, -1)


class DecoderLayer(nn.Module):
    """A token mixer and a feed-forward layer, each behind a norm and beside a residual connection.

    `sparse_moe` makes the feed-forward layer of a layer with experts; what it makes is called like `SparseMoE`.
    """

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        layers: ParallelLayers,
        dtype: torch.dtype,
        sparse_moe: Callable[[ModelConfig, ParallelLayers, torch.dtype], nn.Module] = SparseMoE,
    ) -> None:
        super().__init__()
        self.input_layernorm = ZeroCenteredRMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.is_attention = config.layer_types[index] == FULL_ATTENTION
        if self.is_attention:
            self.self_attn = GatedAttention(config, layers, dtype)
        else:
            self.linear_attn = GatedDeltaNet(config, layers, dtype)
        self.post_attention_layernorm = ZeroCenteredRMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.is_sparse = config.moe_layers[index]
        self.mlp: nn.Module
        if self.is_sparse:
            self.mlp = sparse_moe(config, layers, dtype)
        else:
            assert config.intermediate_size is not None
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, layers, dtype)

    def forward(self, x: Tensor, state: LayerState, context: Context) -> tuple[Tensor, list[LayerState]]:
        """x [B, T, H] and the layer's state rows -> the new x, and the state rows after each of `context.ends`
        tokens.
        """
        mixer = self.self_attn if self.is_attention else self.linear_attn
        mixed, states = mixer(self.input_layernorm(x), state, context)
        x = x + mixed
        normed = self.post_attention_layernorm(x)
        return x + (self.mlp(normed, context.way, context.rank) if self.is_sparse else self.mlp(normed)), states


class RotaryFrequencies(nn.Module):
    """Holds the inverse frequencies, a buffer so that every graph and every rank reads the same bits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", rope_inv_freq(config))
        self.mrope_section = config.rope.mrope_section
        self.scaling = rope_attention_scaling(config)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_cos_sin(positions, self.inv_freq, self.mrope_section, self.scaling)


class HybridCausalLM(nn.Module):
    """One rank of a model. Parameters are left uninitialised; `modeling.weights` fills them."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, parallel: Parallel = SINGLE) -> None:
        super().__init__()
        check_degree(config, parallel.degree, parallel.expert_degree)
        self.config = config
        self.rank: Tensor
        self.register_buffer("rank", torch.tensor([parallel.rank]))
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, parallel, dtype)
        self.rope = RotaryFrequencies(config)
        layers = ParallelLayers(parallel)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, layers, dtype) for index in range(config.num_hidden_layers)
        )
        self.norm = ZeroCenteredRMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.lm_head = VocabParallelHead(
            config.vocab_size, config.hidden_size, parallel, dtype, tied=config.tie_word_embeddings
        )

    def prefill(self, batch: Batch, state: State, checkpoints: tuple[int, ...] = ()) -> PrefillOutput:
        """Context encoding: T tokens from whatever the slots hold.

        `checkpoints`: multiples of the chunk below T after which the state is wanted as well, counted in valid tokens
        of this batch. Raises ValueError for others.
        """
        off_grid = [checkpoint for checkpoint in checkpoints if checkpoint % CHUNK]
        if off_grid or not all(low < high for low, high in pairwise((0, *checkpoints, batch.input_ids.shape[1]))):
            raise ValueError(f"checkpoints {checkpoints} are not ascending multiples of {CHUNK} below T")
        input_ids, rope_positions, order = valid_first(batch.input_ids, batch.valid, batch.rope_positions)
        compact = batch._replace(input_ids=input_ids, rope_positions=rope_positions)
        x, states = self._layers(compact, state, Way.PREFILL, (*checkpoints, input_ids.shape[1]))
        last, hidden = take_last(self.norm(x), batch.valid.sum(dim=1), order)
        return PrefillOutput(self.head(last), hidden, states[-1], states[:-1])

    def decode(self, batch: Batch, state: State) -> tuple[Tensor, State]:
        """Token generation: one token a row (T = 1). Returns logits [B, V] and the new state."""
        x, states = self._layers(batch, state, Way.DECODE, (1,))
        return self.head(self.norm(x)[:, 0]), states[-1]

    def verify(self, batch: Batch, state: State) -> tuple[Tensor, list[State]]:
        """A few tokens a row, valid tokens first: logits [B, T, V], and the state after each of the T tokens.

        The state after token i is the one to go on from if tokens i + 1 ... are rejected; a row with fewer tokens
        keeps its last.
        """
        tokens = batch.input_ids.shape[1]
        x, states = self._layers(batch, state, Way.VERIFY, tuple(range(1, tokens + 1)))
        return self.head(self.norm(x)), states

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] in the model's dtype from normed hidden states [..., H]."""
        return self.lm_head(hidden, self.embed_tokens.weight)

    def _layers(self, batch: Batch, state: State, way: Way, ends: tuple[int, ...]) -> tuple[Tensor, list[State]]:
        """Everything before the last norm, valid tokens first: x [B, T, H], and the state after each of `ends`."""
        cos, sin = self.rope(batch.rope_positions)
        context = Context(way, batch.start, batch.valid.sum(dim=1), cos, sin, ends, self.rank)
        x = self.embed_tokens(batch.input_ids, self.rank)
        states: list[State] = [[] for _ in ends]
        for number, layer in enumerate(self.layers):
            x, new = run_layer(layer, x, state[2 * number : 2 * number + 2], context, batch.slots)
            for collected, pair in zip(states, new, strict=True):
                collected.extend(pair)
        return x, states


def valid_first(input_ids: Tensor, valid: Tensor, rope_positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A batch with every row's valid tokens in front, so that every operation only ever sees padding on the right:
    ids [B, T], positions [3, B, T], and the order [B, T] in which the tokens were taken.
    """
    tokens = input_ids.shape[1]
    index = torch.arange(tokens, device=input_ids.device)
    order = torch.argsort(torch.where(valid, index, index + tokens), dim=1)
    return input_ids.gather(1, order), rope_positions.gather(2, order.expand(3, -1, -1)), order


def run_layer(
    layer: nn.Module, x: Tensor, state: State, context: Context, slots: Tensor | None
) -> tuple[Tensor, list[State]]:
    """One layer between the slots that its state [S, ...] is read from and written to: the new x, and the layer's two
    tensors after each of `context.ends` tokens.
    """
    rows = tuple(read_slots(tensor, slots, context.start) for tensor in state)
    x, after = layer(x, rows, context)
    return x, [
        [write_slots(tensor, row, slots, context.active) for tensor, row in zip(state, pair, strict=True)]
        for pair in after
    ]


def take_last(hidden: Tensor, lengths: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Of `hidden` [B, T, H], valid tokens first: the last valid token of every row [B, H], and all tokens in the order
    that `valid_first` found them in.
    """
    last = take_tokens(hidden, (lengths - 1).clamp(min=0)[:, None])[:, 0]
    return last, take_tokens(hidden, torch.argsort(order, dim=1))
