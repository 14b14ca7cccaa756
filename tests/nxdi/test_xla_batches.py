"""Continuous batching on the lowered graphs: slots in any order, idle rows, and prompts of a batch.

`Hosted.forward` compares, after every call, the bits of all states in the slots that the call does not name.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.nxdi.hosted import DECODE, ONE_BUCKET, SLOTS, Hosted, Requests, assert_close, lowered
from tests.nxdi.references import DECODE_STEPS, FAMILY_NAMES, RAGGED_LENGTHS, Prompt, reference

pytestmark = pytest.mark.nxdi


class Decoding:
    """Prompts that stand in slots and are decoded a few at a time, each to the end of its continuation."""

    def __init__(self, requests: Requests) -> None:
        self.requests = requests
        self.prompts: dict[int, Prompt] = {}
        self.steps: dict[int, int] = {}

    def admit(self, slot: int, prompt: Prompt) -> None:
        assert_close(self.requests.prefill(slot, prompt.ids), prompt.logits[0], f"slot {slot}")
        self.prompts[slot], self.steps[slot] = prompt, 0

    def step(self, slots: tuple[int, ...]) -> None:
        """One token for some slots, rows in this order; -1 for an idle row, which gets a token and a position too."""
        live = [slot for slot in slots if slot >= 0]
        tokens = [[int(self.prompts[slot].continuation[self.steps[slot]])] if slot >= 0 else [77] for slot in slots]
        starts = [self.requests.lengths[slot] if slot >= 0 else 9 for slot in slots]
        logits = self.requests.hosted.forward(tokens, starts, slots)[:, -1]
        for slot in live:
            self.steps[slot] += 1
            self.requests.lengths[slot] += 1
            expected = self.prompts[slot].logits[self.steps[slot]]
            assert_close(logits[slots.index(slot)], expected, f"slot {slot}, token {self.steps[slot]}, of {slots}")

    def unfinished(self) -> list[int]:
        return [slot for slot, count in self.steps.items() if count < DECODE_STEPS]


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_slots_in_any_order_and_idle_rows(name: str) -> None:
    """Rows that NxDI fills up itself, and a full batch whose idle rows hold another token and position."""
    prompts = reference(name).prompts
    hosted = Hosted(lowered(name, **ONE_BUCKET))
    decoding = Decoding(Requests(hosted))
    for slot, length in ((3, 65), (0, 2), (2, 130), (1, 64)):
        decoding.admit(slot, prompts[length])
    for slots in 2 * [(3, 1), (2, -1, 0, -1), (1,), (0, 3, 2), (-1, 3, -1, 1), (2, 0, 1, 3), (2, 0, 3)]:
        decoding.step(slots)
    decoding.admit(0, prompts[3])  # in a slot that another request has left, while three go on
    while left := decoding.unfinished():
        decoding.step(tuple(reversed(left)))
    assert sum(tag == DECODE for tag, _ in hosted.calls) > DECODE_STEPS


def test_control_an_idle_row_that_names_its_slot_changes_it() -> None:
    """Without the mask over `seq_ids`, NxDI's filling rows name the slots that have no part in the call."""
    prompts = reference("qwen3_5").prompts
    hosted = Hosted(lowered("qwen3_5", **ONE_BUCKET))
    decoding = Decoding(Requests(hosted))
    for slot in range(SLOTS):
        decoding.admit(slot, prompts[3])

    def unmasked(inputs: list[Tensor]) -> list[Tensor]:
        idle = inputs[3] < 0
        inputs[3] = torch.where(idle, torch.arange(SLOTS, dtype=torch.int32), inputs[3])
        return inputs

    decoding.step((1, 2))
    hosted.before = unmasked
    with pytest.raises(AssertionError, match="idle slot changed"):
        decoding.step((1, 2))


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_ragged_prompts_in_one_call(name: str) -> None:
    """Prompts of one graph with four rows, then three and a row that NxDI fills up."""
    ragged = reference(name).ragged
    hosted = Hosted(lowered(name, **ONE_BUCKET | {"ctx_batch_size": 4}))
    width = max(RAGGED_LENGTHS)
    for slots in ((2, 0, 3, 1), (0, 1, 3)):
        rows = [torch.cat([prompt.ids, torch.full((width - len(prompt.ids),), 77)]).tolist() for prompt in ragged]
        lengths = RAGGED_LENGTHS[: len(slots)]
        logits = hosted.forward(rows[: len(slots)], [0] * len(slots), slots, lengths)
        for row, slot in enumerate(slots):
            assert_close(logits[row, -1], ragged[row].logits[0], (slots, slot))
        for step in range(2):
            tokens = [[int(prompt.continuation[step])] for prompt in ragged[: len(slots)]]
            logits = hosted.forward(tokens, [length + step for length in lengths], slots)
            for row, slot in enumerate(slots):
                assert_close(logits[row, -1], ragged[row].logits[step + 1], (slots, slot, step))
