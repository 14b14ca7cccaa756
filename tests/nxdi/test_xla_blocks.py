"""Keys and values in blocks, on the lowered graphs: blocks in any order, requests in turn, and shared blocks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.comparison import bits
from tests.nxdi.hosted import BLOCKS, CONTEXT, CONTINUATION, DECODE, ONE_BUCKET, VERIFY, Hosted, assert_close, lowered
from tests.nxdi.references import FAMILY_NAMES, reference

pytestmark = pytest.mark.nxdi
OPTIONS = ONE_BUCKET | BLOCKS | {"continuation_buckets": (3, 80), "speculation_length": 4}
SIZE, COUNT = BLOCKS["pa_block_size"], BLOCKS["pa_num_blocks"]


class Paged:
    """Requests with a slot and a list of blocks each, which are handed out in random order as they are needed.

    After every call all blocks but those that the new tokens belong to are compared with what they held before.
    """

    def __init__(self, hosted: Hosted) -> None:
        self.hosted = hosted
        self.free = (1 + torch.randperm(COUNT - 1, generator=torch.Generator().manual_seed(3))).tolist()
        self.free.insert(-2, 0)  # tables are filled up with block 0: a request shall use it
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def forward(self, tokens: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        """Tokens for some slots, rows in this order -> logits [B, n, V]."""
        count = len(tokens[0])
        touched = set()
        for slot in slots:
            begin = self.lengths.setdefault(slot, 0)
            table = self.tables.setdefault(slot, [])
            while len(table) * SIZE < begin + count:
                table.append(self.free.pop())
            touched |= set(table[begin // SIZE : -(-(begin + count) // SIZE)])
        width = max(len(self.tables[slot]) for slot in slots)
        padded = torch.tensor([self.tables[slot] + [0] * (width - len(self.tables[slot])) for slot in slots])
        before = self.hosted.block_states()
        logits = self.hosted.forward(tokens, [self.lengths[slot] for slot in slots], slots, block_table=padded)
        others = sorted(set(range(COUNT)) - touched)
        for name, state in self.hosted.block_states().items():
            assert torch.equal(bits(state[others]), bits(before[name][others])), f"{name} of another block changed"
        for slot in slots:
            self.lengths[slot] += count
        return logits

    def go_on(self, slot: int, ids: Tensor) -> Tensor:
        """Tokens [T] behind those of a slot -> logits [V] after them."""
        return self.forward([ids.tolist()], [slot])[0, -1]


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_two_requests_in_turn(name: str) -> None:
    """Prompts, pieces, single tokens and drafts of both, in blocks that lie in each other's midst."""
    paged = Paged(Hosted(lowered(name, **OPTIONS)))
    long, short = reference(name).prompts[130], reference(name).prompts[65]
    first, second, third = long.ids.split((50, 2, 78))
    paged.go_on(3, first)
    assert_close(paged.go_on(1, short.ids), short.logits[0], "short prompt")
    paged.go_on(3, second)
    assert_close(paged.go_on(1, short.continuation[:1]), short.logits[1], "short prompt, one token")
    assert_close(paged.go_on(3, third), long.logits[0], "long prompt in three pieces")
    for step in range(12):
        actual = paged.forward([[int(long.continuation[step])], [int(short.continuation[step + 1])]], (3, 1))
        assert_close(actual[:, -1], torch.stack([long.logits[step + 1], short.logits[step + 2]]), step)
    draft = long.continuation[12:16].tolist()
    assert_close(paged.forward([draft], [3])[0], long.logits[13:17], "draft")
    assert {tag for tag, _ in paged.hosted.calls} == {CONTEXT, CONTINUATION, DECODE, VERIFY}
    assert 0 in paged.tables[3]


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_shared_prefix(name: str) -> None:
    """A second request reads the first one's blocks of a common prefix and takes a copy of its GDN states."""
    paged = Paged(Hosted(lowered(name, **OPTIONS)))
    prompt = reference(name).prompts[130]
    shared = 4 * SIZE
    paged.go_on(0, prompt.ids[:shared])
    for state, values in paged.hosted.slot_states().items():
        copied = values.clone()
        copied[2] = values[0]
        paged.hosted.values[state] = copied
    paged.tables[2], paged.lengths[2] = list(paged.tables[0]), shared
    held = {state: values[paged.tables[0]] for state, values in paged.hosted.block_states().items()}

    cuts = {0: prompt.ids[shared:].split(66), 2: prompt.ids[shared:].split((30, 36))}
    for slot, pieces in cuts.items():
        logits = torch.stack([paged.go_on(slot, piece) for piece in pieces])[-1]
        assert_close(logits, prompt.logits[0], slot)
    for step in range(3):
        actual = paged.forward([[int(prompt.continuation[step])]] * 2, (2, 0))
        assert_close(actual[:, -1], prompt.logits[step + 1].expand(2, -1), step)
    assert paged.tables[0][:4] == paged.tables[2][:4] and not set(paged.tables[0][4:]) & set(paged.tables[2][4:])
    for state, values in paged.hosted.block_states().items():
        assert torch.equal(values[paged.tables[0][:4]], held[state]), f"{state}: a shared block was written"
