"""Prompts above the largest bucket: NxDI's `forward` takes them, and this port runs them in pieces of it."""

from __future__ import annotations

import pytest

from tests.comparison import relative
from tests.nxdi.hosted import BUCKETS, TOLERANCE, Hosted, lowered
from tests.nxdi.references import reference

pytestmark = pytest.mark.nxdi
NAME = "qwen3_5_moe"
LARGEST = 64
OPTIONS = BUCKETS | {
    "max_context_length": LARGEST,
    "context_encoding_buckets": (LARGEST,),
    "continuation_buckets": (LARGEST,),
    "token_generation_buckets": (146,),
}


@pytest.mark.parametrize("length", [64, 65, 128, 129, 130])
def test_one_prompt(length: int) -> None:
    """The last piece may be full, or a single token, which is no step of decode."""
    hosted = Hosted(lowered(NAME, **OPTIONS))
    ids = reference(NAME).prompts[130].ids[:length]
    every = reference(NAME).every
    assert every is not None
    logits = hosted.forward([ids.tolist()], [0], [2])
    assert relative(logits[0, -1], every[length - 1]) <= TOLERANCE
    pieces = -(-length // LARGEST)
    assert hosted.calls == [("context_encoding_model", LARGEST)] + [("continuation_model", LARGEST)] * (pieces - 1)


def test_ragged_prompts() -> None:
    """Rows that end in an earlier piece keep their logits and their state."""
    prompts = reference(NAME).prompts
    lengths = (130, 3, 65)
    hosted = Hosted(lowered(NAME, **OPTIONS))
    rows = [[*prompts[length].ids.tolist(), *[0] * (130 - length)] for length in lengths]
    logits = hosted.forward(rows, [0, 0, 0], [2, 0, 3], lengths=lengths)
    for row, length in enumerate(lengths):
        assert relative(logits[row, -1], prompts[length].logits[0]) <= TOLERANCE
    tokens = [[int(prompts[length].continuation[0])] for length in lengths]
    logits = hosted.forward(tokens, lengths, [2, 0, 3])
    for row, length in enumerate(lengths):
        assert relative(logits[row, -1], prompts[length].logits[1]) <= TOLERANCE
