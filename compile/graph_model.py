"""A model that runs as captured graphs: the parts of a pass one after the other, each with its own weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from nxdi_qwen.compile.graphs import (
    CONTEXT,
    CONTINUATION,
    DECODE,
    EMBED,
    HEAD,
    LOGITS,
    GraphSpec,
    continues_apart,
    graph_weights,
    layer_kind,
)
from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.model import Batch, State


class GraphModel:
    """Runs graphs, by the names of their specs, with one rank's weights, which all graphs share.

    `watch` is called with what goes into the first layer of a pass and with what comes out of each, [B, T, H].
    """

    def __init__(
        self, config: ModelConfig, calls: Mapping[str, Callable[..., Any]], weights: Mapping[str, Tensor]
    ) -> None:
        self.watch: Callable[[Tensor], None] = lambda x: None
        self._calls = calls
        layers = range(config.num_hidden_layers)
        self._kinds = [layer_kind(config, layer) for layer in layers]
        self._apart = [continues_apart(config, layer) for layer in layers]

        def chosen(part: str, layer: int | None = None) -> list[Tensor]:
            return [weights[name] for name in graph_weights(GraphSpec(DECODE, 0, 0, part), config, layer)]

        self._embed, self._logits = chosen(EMBED), chosen(LOGITS)
        self._layers = [chosen(kind, layer) for layer, kind in enumerate(self._kinds)]
        self._head = [weights[name] for name in graph_weights(GraphSpec(HEAD, 0, 0), config)]

    def context(self, batch: Batch, state: State) -> tuple[Tensor, Tensor, State]:
        """Logits [B, V] after each row's last valid token, hidden [B, T, H] for the head, the new state."""
        assert batch.slots is not None
        x, lengths, (order,), state = self._pass(CONTEXT, batch, (batch.slots,), state)
        logits, hidden = self._call(CONTEXT, batch, LOGITS)(self._logits, x, lengths, order)
        return logits, hidden, state

    def decode(self, batch: Batch, state: State) -> tuple[Tensor, State]:
        """One token for every slot, row i being slot i: logits [S, V], the new state."""
        x, _, _, state = self._pass(DECODE, batch, (), state)
        (logits,) = self._call(DECODE, batch, LOGITS)(self._logits, x)
        return logits, state

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] from hidden [N, H], N being the head graph's rows."""
        return self._calls[HEAD](self._head, hidden)

    def _call(self, kind: str, batch: Batch, part: str) -> Callable[..., Any]:
        rows, tokens = batch.input_ids.shape
        return self._calls[GraphSpec(kind, rows, tokens, part).name]

    def _pass(
        self, kind: str, batch: Batch, slots: tuple[Tensor, ...], state: State
    ) -> tuple[Tensor, Tensor, list[Tensor], State]:
        """Everything before the logits: x, lengths, what else the embedding's graph returns, the new state."""
        ids, valid, positions, start = _contiguous((batch.input_ids, batch.valid, batch.rope_positions, batch.start))
        embedded = self._call(kind, batch, EMBED)(self._embed, ids, valid, positions)
        x, cos, sin, lengths, *rest = _contiguous(embedded)
        self.watch(x)
        new: State = []
        continues = kind == CONTEXT and bool((start > 0).any())
        for number, (part, weights) in enumerate(zip(self._kinds, self._layers, strict=True)):
            old = state[2 * number : 2 * number + 2]
            own = CONTINUATION if continues and self._apart[number] else kind
            x, after = self._call(own, batch, part)(weights, x, cos, sin, start, lengths, *slots, old)
            x, *after = _contiguous((x, *after))
            self.watch(x)
            new.extend(after)
        return x, lengths, rest, new


def _contiguous(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors as graphs take them: compiled code trusts the strides it was captured with, and reads past others. Some
    versions of torch do not keep those of what it returns.
    """
    return [tensor.contiguous() for tensor in tensors]
