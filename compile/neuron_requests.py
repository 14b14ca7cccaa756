"""Requests in the slots of an NxDI application, called as NxDI's generation adapter and vLLM call it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Application(Protocol):
    """What is called: a loaded NxDI application, or anything with its signature."""

    def __call__(
        self,
        *,
        input_ids: Tensor,  # [B, T] int64
        position_ids: Tensor,  # [B, T] int64
        attention_mask: Tensor,  # prompts: [B, T], decode: [B, longest + 1]; int64, 1: valid
        seq_ids: Tensor,  # [B] int64: slots
        sampling_params: Tensor,  # [B, 3] float32: top-k, top-p, temperature
    ) -> Any:
        """Has `logits` [B, 1, V] after each row's last token, or None and `tokens` [B] sampled on the device."""


class Output(NamedTuple):
    """The next token of each row, on the host; `logits` [B, V] in the graph's dtype where it returns them."""

    tokens: list[int]
    logits: Tensor | None


class Requests:
    """`lengths` holds the tokens in each slot in use."""

    def __init__(self, application: Application) -> None:
        self.application = application
        self.lengths: dict[int, int] = {}

    def prefill(self, slot: int, ids: Sequence[int]) -> Output:
        """Starts a request in `slot`, whatever it held: one call with one row."""
        self.lengths[slot] = len(ids)
        positions = torch.arange(len(ids))[None]
        return self._call(torch.tensor([list(ids)]), positions, torch.ones_like(positions), [slot])

    def decode(self, tokens: Mapping[int, int]) -> Output:
        """One step for the slots named, each with its next token: one call, rows in the order of `tokens`."""
        positions = torch.tensor([[self.lengths[slot]] for slot in tokens])
        for slot in tokens:
            self.lengths[slot] += 1
        mask = (torch.arange(int(positions.max()) + 1) <= positions).to(torch.int64)
        return self._call(torch.tensor([[token] for token in tokens.values()]), positions, mask, list(tokens))

    @torch.no_grad()
    def _call(self, ids: Tensor, positions: Tensor, mask: Tensor, slots: list[int]) -> Output:
        output = self.application(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            seq_ids=torch.tensor(slots),
            # NxDI's default has a row for every slot, and a compiled graph for one prompt does not take those.
            sampling_params=torch.ones(len(slots), 3),
        )
        if output.logits is None:
            return Output(output.tokens.reshape(len(slots)).tolist(), None)
        logits = output.logits[:, -1]
        return Output(logits.argmax(dim=-1).tolist(), logits)
