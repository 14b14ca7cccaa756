"""What passes between the layers of a model, caught by hooks or told by its graphs."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nxdi_qwen.compile.graph_model import GraphModel


class Choice(NamedTuple):
    """What a router decided: its logits [N, E] and the chosen experts [N, k]."""

    logits: Tensor
    experts: Tensor


class Caught(NamedTuple):
    """N tokens of one row: `hidden` [layers + 1, N, H]; `experts` [sparse layers, N, k] and `margins`
    [sparse layers, N] as in `Run`, None without sparse layers.
    """

    hidden: Tensor
    experts: Tensor | None
    margins: Tensor | None


class Tap(abc.ABC):
    """Catches every pass through a model's layers while `open`."""

    def __init__(self, layers: int, sparse_layers: int) -> None:
        self._layers, self._sparse_layers = layers, sparse_layers
        self._hidden: list[Tensor] = []  # pass by pass, layers + 1 each, [B, T, H]
        self._choices: list[tuple[Tensor, Tensor]] = []  # pass by pass, one a sparse layer: [B * T, k], [B * T]

    @contextmanager
    def open(self) -> Iterator[Tap]:
        """Inside, passes are caught."""
        self._hidden, self._choices = [], []
        with self._watching():
            yield self

    @abc.abstractmethod
    def _watching(self) -> AbstractContextManager[None]:
        """Inside, `_hidden` and `_choices` grow with every pass."""

    def take(self, row: int, counts: Sequence[int]) -> Caught:
        """The first `counts[i]` tokens of `row` in the i-th of the passes since the last call, joined."""
        wide, sparse = self._layers + 1, self._sparse_layers
        hidden, experts, margins = [], [], []
        for number, count in enumerate(counts):
            passed = self._hidden[number * wide : (number + 1) * wide]
            hidden.append(torch.stack([x[row, :count] for x in passed]))
            tokens = passed[0].shape[1]
            own = slice(row * tokens, row * tokens + count)
            for chosen, margin in self._choices[number * sparse : (number + 1) * sparse]:
                experts.append(chosen[own])
                margins.append(margin[own])
        self._hidden, self._choices = [], []
        together = torch.cat(hidden, dim=1)
        if not sparse:
            return Caught(together, None, None)
        by_layer = [slice(layer, None, sparse) for layer in range(sparse)]
        return Caught(
            together,
            torch.stack([torch.cat(experts[layer]) for layer in by_layer]),
            torch.stack([torch.cat(margins[layer]) for layer in by_layer]),
        )


class ModuleTap(Tap):
    """Of a model made of modules.

    `router_of` finds the router of a layer, and `read` what it decided, from the router, its input and its output.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        router_of: Callable[[nn.Module], nn.Module | None],
        read: Callable[[nn.Module, Tensor, Any], Choice],
    ) -> None:
        self._modules = layers
        self._routers = [router for layer in layers if (router := router_of(layer)) is not None]
        self._read = read
        super().__init__(len(layers), len(self._routers))

    @contextmanager
    def _watching(self) -> Iterator[None]:
        first, *_ = self._modules
        handles = [first.register_forward_pre_hook(self._entering, with_kwargs=True)]
        handles += [layer.register_forward_hook(self._leaving) for layer in self._modules]
        handles += [router.register_forward_hook(self._chosen) for router in self._routers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._hidden.append((args[0] if args else kwargs["hidden_states"]).detach())

    def _leaving(self, _: nn.Module, __: Any, output: Any) -> None:
        self._hidden.append((output[0] if isinstance(output, tuple) else output).detach())

    def _chosen(self, router: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        choice = self._read(router, args[0], output)
        self._choices.append((choice.experts.sort(dim=-1).values, router_margin(choice)))


class GraphTap(Tap):
    """Of a model that runs a graph for each layer, which tells hidden states and no experts."""

    def __init__(self, model: GraphModel, layers: int) -> None:
        super().__init__(layers, 0)
        self._model = model

    @contextmanager
    def _watching(self) -> Iterator[None]:
        before, self._model.watch = self._model.watch, lambda x: self._hidden.append(x)
        try:
            yield
        finally:
            self._model.watch = before


def router_margin(choice: Choice) -> Tensor:
    """[N] float32: how much more probable the last chosen expert is than the first that was not; infinite where all
    are chosen.
    """
    probabilities = torch.softmax(choice.logits.to(torch.float32), dim=-1)
    top_k, experts = choice.experts.shape[1], probabilities.shape[1]
    if top_k == experts:
        return torch.full(probabilities.shape[:1], torch.inf)
    best = torch.topk(probabilities, top_k + 1, dim=-1).values
    return best[:, top_k - 1] - best[:, top_k]


def joined(parts: Sequence[Caught]) -> Caught:
    """The tokens of all parts, one after the other."""
    hidden = torch.cat([part.hidden for part in parts], dim=1)
    experts = [part.experts for part in parts if part.experts is not None]
    margins = [part.margins for part in parts if part.margins is not None]
    if not experts:
        return Caught(hidden, None, None)
    return Caught(hidden, torch.cat(experts, dim=1), torch.cat(margins, dim=1))
