"""The situations in which a model must agree with Hugging Face, run on any `Forward`: eager or exported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support import (
    DECODE_STEPS,
    Engine,
    Forward,
    assert_close,
    reference_decode,
    reference_prefill,
    tokens_of,
)

LENGTHS = (1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, 200)
# Ragged batches that hold every length once.
GROUPS = ((1, 5, 64, 200), (2, 63, 65, 128), (3, 4, 127, 129))
LAYOUTS = ("right", "left", "interior")
PREFIXES = (1, 2, 3, 63, 64, 65)
PIECES = (1, 3, 16, 64)
# Rows in no order, more slots than rows.
PERMUTED_SLOTS = (3, 0, 4, 1)


def one_row(forward: Forward, name: str, length: int) -> None:
    """A prompt of `length` tokens alone, in a bucket of its size where the shapes are free."""
    result = Engine(forward).prefill({2: tokens_of(name, 0)[:length]})[2]
    expected = reference_prefill(name, 0, length)
    assert_close(result.every, expected, "every token")
    assert_close(result.last, expected[-1], "last token")


def ragged_batch(
    forward: Forward, name: str, lengths: Sequence[int], layout: str, bucket: int, steps: int = DECODE_STEPS
) -> None:
    """Four distinct prompts in one batch, then decode steps of all four."""
    engine = Engine(forward)
    requests = dict(zip(PERMUTED_SLOTS, enumerate(lengths), strict=True))
    prompts = {slot: tokens_of(name, n)[:length] for slot, (n, length) in requests.items()}
    results = engine.prefill(prompts, layout, bucket)
    for slot, (n, length) in requests.items():
        assert_close(results[slot].every, reference_prefill(name, n, length), f"every token of {length}")
        assert_close(results[slot].last, reference_decode(name, n, length)[0], f"last token of {length}")
    for step in range(steps):
        logits = engine.decode({slot: int(tokens_of(name, n)[length + step]) for slot, (n, length) in requests.items()})
        for slot, (n, length) in requests.items():
            assert_close(logits[slot], reference_decode(name, n, length)[step + 1], f"step {step} after {length}")


def continued_in_pieces(forward: Forward, name: str, prefix: int, layout: str) -> None:
    """Four prompts cut after `prefix` tokens; each goes on by three pieces of its own size, a decode step, a piece."""
    engine = Engine(forward)
    rows = dict(zip(PERMUTED_SLOTS, enumerate(PIECES), strict=True))
    logits: dict[int, list[Tensor]] = {slot: [] for slot in rows}

    def following(slot: int, count: int) -> Tensor:
        begin = engine.lengths[slot]
        return tokens_of(name, rows[slot][0])[begin : begin + count]

    def prefill(counts: dict[int, int]) -> None:
        results = engine.prefill({slot: following(slot, count) for slot, count in counts.items()}, layout)
        for slot, result in results.items():
            logits[slot].append(result.every)
            assert_close(result.last, result.every[-1], "last token")

    pieces = {slot: piece for slot, (_, piece) in rows.items()}
    prefill(dict.fromkeys(rows, prefix))
    for _ in range(3):
        prefill(pieces)
    for slot, step in engine.decode({slot: int(following(slot, 1)) for slot in rows}).items():
        logits[slot].append(step[None])
    prefill(pieces)
    for slot, (n, piece) in rows.items():
        expected = reference_prefill(name, n, prefix + 4 * piece + 1)
        assert_close(torch.cat(logits[slot]), expected, f"{prefix} tokens, then pieces of {piece}")


@dataclass
class Request:
    """A request in a slot: prompt `seed` of the fixture, teacher-forced; `step` tokens have been decoded."""

    name: str
    seed: int
    length: int
    step: int = 0

    def check(self, logits: Tensor) -> None:
        expected = reference_decode(self.name, self.seed, self.length)[self.step]
        assert_close(logits, expected, f"request {self.seed}, step {self.step}")


def joins_and_leaves(forward: Forward, name: str) -> None:
    """Requests come and go while others decode; rows idle, slots are used again, one by a prompt of a single token."""
    engine = Engine(forward)
    running: dict[int, Request] = {}

    def join(**newcomers: tuple[int, int]) -> None:
        requests = {int(slot[-1]): Request(name, seed, length) for slot, (seed, length) in newcomers.items()}
        for slot in requests:
            engine.lengths[slot] = 0
        running.update(requests)
        prompts = {slot: tokens_of(name, r.seed)[: r.length] for slot, r in requests.items()}
        for slot, result in engine.prefill(prompts, "left").items():
            requests[slot].check(result.last)

    def decode(steps: int, *slots: int) -> None:
        for _ in range(steps):
            tokens = {s: int(tokens_of(name, running[s].seed)[running[s].length + running[s].step]) for s in slots}
            for slot, logits in engine.decode(tokens).items():
                running[slot].step += 1
                running[slot].check(logits)

    join(slot2=(2, 64), slot0=(1, 63))
    decode(3, 0, 2)
    join(slot4=(0, 3))
    decode(3, 0, 2, 4)
    decode(2, 0, 4)  # slot 2 waits
    join(slot0=(3, 128))  # its first request has left
    decode(3, 0, 2, 4)
    join(slot2=(1, 4), slot1=(0, 1))  # one slot used again, one for the first time; slot 4 falls idle
    decode(4, 0, 1, 2)
    decode(2, 1)
    decode(2, 2, 0)
