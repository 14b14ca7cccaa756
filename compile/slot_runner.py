"""Requests in slots: owns the state and the lengths, and builds the batches that an executor runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from nxdi_qwen.compile.executor import Executor
from nxdi_qwen.compile.graphs import HEAD_ROWS
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.model import Batch, text_positions


def check_prompt(ids: Sequence[int], vocab_size: int, max_length: int) -> None:
    """Raises InputError for a prompt that is empty, longer than `max_length` tokens, or holds an id outside the
    vocabulary.
    """
    if not ids:
        raise InputError("the prompt is empty: give at least one token")
    if len(ids) > max_length:
        raise InputError(
            f"the prompt has {len(ids)} tokens, at most {max_length} fit: compile with a larger --max-length"
        )
    for position, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise InputError(f"token id {token} at position {position} is outside the vocabulary of {vocab_size}")


class SlotRunner:
    """Prefills and decodes by slot. Text only: rotary positions count tokens."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.state = executor.description.allocate()
        self.lengths = [0] * executor.description.slots

    def prefill(self, slot: int, ids: Sequence[int]) -> Tensor:
        """Starts a request in `slot`, whatever it held. Returns logits [V] float32 after the last token."""
        for logits, _ in self._encode(slot, ids):
            last = logits
        return last[0].to(torch.float32)

    def prefill_all_logits(self, slot: int, ids: Sequence[int]) -> Tensor:
        """Like `prefill`, but returns the logits after every token, [T, V] float32."""
        return torch.cat(list(self.prefill_blocks(slot, ids)))

    def prefill_blocks(self, slot: int, ids: Sequence[int]) -> Iterator[Tensor]:
        """Like `prefill_all_logits`, a few positions at a time: [N, V] float32, in order. The request has started when
        all are taken. After the last token of a piece they are the graph's own, which `prefill` returns.
        """
        for logits, hidden in self._encode(slot, ids):
            *blocks, last = hidden.split(HEAD_ROWS)
            for block in blocks:
                yield self.executor.head(block).to(torch.float32)
            yield torch.cat([self.executor.head(last)[:-1], logits]).to(torch.float32)

    def decode(self, tokens: Mapping[int, int]) -> dict[int, Tensor]:
        """One step for the slots named, each with its next token: logits [V] float32 by slot.

        Other slots stay as they are.
        """
        slots = len(self.lengths)
        for slot in tokens:
            if not 0 < self.lengths[slot] < self.executor.description.max_length:
                raise InputError(f"slot {slot} holds {self.lengths[slot]} tokens: nothing can be appended to it")
        ids = torch.zeros(slots, 1, dtype=torch.int64)
        valid = torch.zeros(slots, 1, dtype=torch.bool)
        for slot, token in tokens.items():
            ids[slot], valid[slot] = token, True
        start = torch.tensor(self.lengths)
        batch = Batch(ids, valid, text_positions(start, valid), start, None)
        logits, self.state = self.executor.decode(batch, self.state)
        for slot in tokens:
            self.lengths[slot] += 1
        return {slot: logits[slot].to(torch.float32) for slot in tokens}

    def _encode(self, slot: int, ids: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """For each piece of the prompt, logits [1, V] after its last token and hidden [N, H] of its N tokens."""
        check_prompt(ids, self.executor.config.vocab_size, self.executor.description.max_length)
        self.lengths[slot] = 0  # what the slot held is overwritten from here on, even if this fails
        done = 0
        for bucket, count in self.executor.buckets.cut(len(ids)):
            padded = torch.zeros(1, bucket, dtype=torch.int64)
            padded[0, :count] = torch.tensor(ids[done : done + count])
            valid = (torch.arange(bucket) < count)[None]
            start = torch.tensor([done])
            batch = Batch(padded, valid, text_positions(start, valid), start, torch.tensor([slot]))
            logits, hidden, self.state = self.executor.context(batch, self.state)
            yield logits, hidden[0, :count]
            done += count
        self.lengths[slot] = done
