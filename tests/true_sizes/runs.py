"""One row of text through either model: the logits, and the experts on the way."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache

from nxdi_qwen.modeling.layers.mlp import Router
from nxdi_qwen.modeling.model import Batch, text_positions
from nxdi_qwen.modeling.state import describe_state
from tests.true_sizes.shared_model import Pair

KEPT = 64  # logits of so many tokens of a prompt are compared: those of 4,096 would take 4 GB


class Text(NamedTuple):
    """`ids` [length + steps] int64: a prompt of `length` tokens, and what follows it, fed token by token."""

    name: str
    length: int
    ids: Tensor

    @property
    def kept(self) -> int:
        return min(KEPT, self.length)


class Run(NamedTuple):
    """`logits` [kept + steps, V] float32. `experts` [length + steps, MoE layers, k] int64, ascending: each router's
    own choice (no layers, no experts: dense). `gap`: see `Side.run`. All on the CPU.
    """

    logits: Tensor
    experts: Tensor
    gap: float
    seconds: float


def texts(vocab_size: int, lengths: Sequence[int], repeated: int | None, steps: int) -> list[Text]:
    """Random texts with prompts of `lengths`, and one whose prompt is one token `repeated` times; by length."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> Tensor:
        return torch.randint(0, vocab_size, (count,), generator=generator)

    result = [Text(f"{length} random", length, draw(length + steps)) for length in lengths]
    if repeated is not None:
        same = torch.cat([draw(1).expand(repeated), draw(steps)])
        result.append(Text(f"{repeated} equal", repeated, same))
    return sorted(result, key=lambda text: text.length)


class Side(NamedTuple):
    """One of the two models: its logits of a text, and its routers, which return what they chose at index `chosen`
    and the weights at index `weights`.
    """

    logits: Callable[[Text], Tensor]
    routers: list[nn.Module]
    chosen: int
    weights: int
    renormalize: bool

    @torch.no_grad()
    def run(self, text: Text, experts: Tensor | None = None) -> Run:
        """With `experts` [length + steps, layers, k] every router takes these, weighted by its own probabilities.

        `gap` then says how far its own choice was from them: of the experts that are in only one of the two sets, the
        most probable over the least, less one; the largest over all tokens and layers, 0 where all agree.
        """
        own: list[list[Tensor]] = [[] for _ in self.routers]
        gaps = [torch.zeros(())]

        def hook(layer: int, router: Any, x: Tensor, output: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            begin = sum(map(len, own[layer]))
            chosen = output[self.chosen]
            own[layer].append(chosen.sort(dim=-1).values.cpu())
            if experts is None:
                return None
            taken = experts[begin : begin + len(own[layer][-1]), layer].to(x.device)
            scores = functional.linear(x.flatten(0, -2), router.weight)
            probabilities = torch.softmax(scores.float(), dim=-1)
            weights = probabilities.gather(1, taken)
            gaps.append(_gap(probabilities, chosen, taken))
            if self.renormalize:
                weights = weights / weights.sum(dim=-1, keepdim=True)
            changed = list(output)
            changed[self.chosen], changed[self.weights] = taken, weights.to(scores.dtype)
            return tuple(changed)

        handles = [
            router.register_forward_hook(lambda module, args, out, n=n: hook(n, module, args[0], out))
            for n, router in enumerate(self.routers)
        ]
        begin = time.perf_counter()
        try:
            logits = self.logits(text)
        finally:
            for handle in handles:
                handle.remove()
        chosen = [torch.cat(layer) for layer in own]
        stacked = torch.stack(chosen, dim=1) if chosen else torch.empty(len(text.ids), 0, 0, dtype=torch.int64)
        return Run(logits, stacked, torch.stack(gaps).max().item(), time.perf_counter() - begin)


def _gap(probabilities: Tensor, chosen: Tensor, taken: Tensor) -> Tensor:
    """`Side.run`'s gap of one layer, [] float32 on the CPU: probabilities [N, E], experts [N, k]."""
    none = torch.zeros_like(probabilities, dtype=torch.bool)
    differ = none.scatter(1, chosen, True) ^ none.scatter(1, taken, True)
    most = torch.where(differ, probabilities, 0.0).max(dim=-1).values
    least = torch.where(differ, probabilities, torch.inf).min(dim=-1).values
    return torch.where(differ.any(dim=-1), most / least - 1, 0.0).max().cpu()


def their_side(pair: Pair) -> Side:
    """Hugging Face's: prefill with a cache, then token by token."""

    def logits(text: Text) -> Tensor:
        cache = DynamicCache(config=pair.reference.config)
        ids = text.ids.to(pair.device)
        parts = []
        for piece in (ids[: text.length], *ids[text.length :].split(1)):
            out = pair.reference(input_ids=piece[None], cache=cache, use_cache=True, logits_to_keep=text.kept)
            parts.append(out.logits[0].float().cpu())
        return torch.cat(parts)

    routers = [layer.mlp.gate for layer in pair.reference.model.layers if hasattr(layer.mlp, "gate")]
    return Side(logits, routers, chosen=2, weights=1, renormalize=pair.config.norm_topk_prob)


def our_side(pair: Pair, dtype: torch.dtype) -> Side:
    """Ours, computing in `dtype`: one row, its state as long as the text."""

    def logits(text: Text) -> Tensor:
        ids = text.ids.to(pair.device)
        state = describe_state(pair.config, 1, len(ids), dtype).allocate(pair.device)
        out = pair.model.prefill(_batch(ids[: text.length], 0), state)
        parts = [pair.model.head(out.hidden[0, -text.kept :]).float().cpu()]
        state = out.state
        for position in range(text.length, len(ids)):
            step, state = pair.model.decode(_batch(ids[position : position + 1], position), state)
            parts.append(step.float().cpu())
        return torch.cat(parts)

    routers: list[nn.Module] = [module for module in pair.model.modules() if isinstance(module, Router)]
    return Side(logits, routers, chosen=0, weights=1, renormalize=pair.config.norm_topk_prob)


def _batch(ids: Tensor, start: int) -> Batch:
    valid = torch.ones(1, len(ids), dtype=torch.bool, device=ids.device)
    starts = torch.tensor([start], device=ids.device)
    return Batch(ids[None], valid, text_positions(starts, valid), starts, None)


@contextmanager
def step_by_step(pair: Pair) -> Iterator[None]:
    """Hugging Face's prefill by its own rule for single tokens instead of the one in chunks."""
    module = sys.modules[type(pair.reference).__module__]
    with mock.patch.object(module, "torch_chunk_gated_delta_rule", module.torch_recurrent_gated_delta_rule):
        yield
