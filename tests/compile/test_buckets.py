"""Buckets: which lengths are accepted, and how prompts are cut into them."""

from __future__ import annotations

import pytest

from nxdi_qwen.compile.buckets import Buckets
from nxdi_qwen.modeling.errors import InputError


def test_lengths_are_sorted_and_distinct() -> None:
    assert Buckets.choose(1000, (512, 64, 128, 64)).lengths == (64, 128, 512)


@pytest.mark.parametrize(
    ("max_length", "lengths"),
    [(4096, (128, 512, 2048)), (2048, (128, 512, 2048)), (600, (128, 512, 640)), (100, (128,)), (1, (64,))],
)
def test_defaults_fit_the_maximum_length(max_length: int, lengths: tuple[int, ...]) -> None:
    assert Buckets.choose(max_length).lengths == lengths


@pytest.mark.parametrize(
    ("max_length", "lengths", "message"),
    [
        (512, (), "no bucket given"),
        (512, (100,), "bucket 100 is not on the grid of 64 tokens: use 128"),
        (512, (128, 1), "bucket 1 is not on the grid of 64 tokens: use 64"),
        (512, (0,), "bucket 0 is not on the grid of 64 tokens: use 64"),
        (512, (-64,), "bucket -64 is not on the grid of 64 tokens: use 64"),
        (512, (576,), "bucket 576 is longer than the maximum length 512: use at most 512"),
        (500, (576,), "longer than the maximum length 500: use at most 512"),
    ],
)
def test_refused(max_length: int, lengths: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Buckets.choose(max_length, lengths)


@pytest.mark.parametrize(
    ("tokens", "pieces"),
    [
        (1, [(64, 1)]),
        (64, [(64, 64)]),
        (65, [(192, 65)]),
        (192, [(192, 192)]),
        (193, [(192, 192), (64, 1)]),
        (449, [(192, 192), (192, 192), (192, 65)]),
        (448, [(192, 192), (192, 192), (64, 64)]),
    ],
)
def test_cut(tokens: int, pieces: list[tuple[int, int]]) -> None:
    assert Buckets((64, 192)).cut(tokens) == pieces


@pytest.mark.parametrize("lengths", [(64,), (128,), (64, 128), (64, 192, 512)])
def test_every_cut_covers_the_prompt_on_the_grid(lengths: tuple[int, ...]) -> None:
    buckets = Buckets(lengths)
    for tokens in range(1, 1200):
        done = 0
        for bucket, count in buckets.cut(tokens):
            assert done % 64 == 0
            assert bucket in lengths and 0 < count <= bucket
            assert all(smaller < count for smaller in lengths if smaller < bucket), "a smaller bucket would do"
            done += count
        assert done == tokens
        assert buckets.cuts_prompts(tokens) == (len(buckets.cut(tokens)) > 1)
