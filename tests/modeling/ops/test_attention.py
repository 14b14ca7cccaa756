"""Attention over a slot's cache against torch's and Hugging Face's attention over what was really said."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_next.modeling_qwen3_next import eager_attention_forward

from nxdi_qwen.modeling.ops import attention
from nxdi_qwen.modeling.ops.attention import append_to_cache, cached_attention, segment_attention
from tests.comparison import relative

KV_HEADS, DIM, LENGTH = 2, 16, 90
POISONS = [float("nan"), float("inf"), float("-inf"), 1e30]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def expected_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The last tokens of a row, query [Hq, T, d], over everything said, key and value [Hkv, L, d]: [T, Hq, d]."""
    tokens, length = query.shape[1], key.shape[1]
    groups = query.shape[0] // key.shape[0]
    future = torch.full((tokens, length), float("-inf")).triu(length - tokens + 1)
    hf, _ = eager_attention_forward(
        SimpleNamespace(num_key_value_groups=groups, training=False),
        query[None],
        key[None],
        value[None],
        future,
        scaling=DIM**-0.5,
    )
    repeated = (x.double().repeat_interleave(groups, dim=0) for x in (key, value))
    exact = functional.scaled_dot_product_attention(query.double(), *repeated, attn_mask=future.double())
    assert relative(hf[0], exact.transpose(0, 1)) < 1e-6
    return hf[0]


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("heads", [2, 4, 6])
@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_ragged_rows_behind_what_their_slots_hold(tokens: int, heads: int, poison: float) -> None:
    """Rows at the beginning, in the middle, at the very end of their slot, idle; the rest of a cache is poison."""
    start = torch.tensor([0, 5, LENGTH - tokens, 40])
    lengths = torch.tensor([tokens, (tokens + 1) // 2, tokens, 0])
    said_key, said_value = normal(4, KV_HEADS, LENGTH, DIM, seed=1), normal(4, KV_HEADS, LENGTH, DIM, seed=2)
    query = normal(4, heads, tokens, DIM, seed=3)
    position, valid = torch.arange(LENGTH), torch.arange(tokens) < lengths[:, None]
    held = (position < start[:, None])[:, None, :, None]
    caches = []
    for said in (said_key, said_value):
        segment = torch.stack([said[row, :, begin : begin + tokens] for row, begin in enumerate(start.tolist())])
        other_poison = float("inf") if math.isnan(poison) else float("nan")  # not what the cache holds there
        segment = torch.where(valid[:, None, :, None], segment, other_poison)
        cache = append_to_cache(torch.where(held, said, poison), segment.transpose(1, 2), start, lengths)
        now_held = (position < (start + lengths)[:, None])[:, None, :, None]
        assert torch.equal(torch.where(now_held, cache, 0.0), torch.where(now_held, said, 0.0))
        same = torch.where(now_held, 0.0, cache)
        assert torch.equal(same.nan_to_num(7.0), torch.where(now_held, 0.0, poison).expand_as(same).nan_to_num(7.0))
        caches.append(cache)
    query = torch.where(valid[:, None, :, None], query, poison)

    out = cached_attention(query, *caches, start, lengths)
    assert out.shape == (4, tokens, heads, DIM)
    for row, (begin, length) in enumerate(zip(start.tolist(), lengths.tolist(), strict=True)):
        if length:
            end = begin + length
            expected = expected_attention(query[row, :, :length], said_key[row, :, :end], said_value[row, :, :end])
            assert relative(out[row, :length], expected) < 2e-6


def test_poison_changes_no_bit() -> None:
    start, lengths = torch.tensor([0, 5, 30]), torch.tensor([9, 6, 1])
    query = normal(3, 4, 9, DIM, seed=3)
    outputs = []
    for poison in [0.0, *POISONS]:
        beyond = torch.arange(LENGTH) >= (start + lengths)[:, None]
        key, value = (
            torch.where(beyond[:, None, :, None], poison, normal(3, KV_HEADS, LENGTH, DIM, seed=seed))
            for seed in (1, 2)
        )
        out = cached_attention(query, key, value, start, lengths)
        valid = torch.arange(9) < lengths[:, None]
        outputs.append(torch.where(valid[..., None, None], out, 0.0))
    assert all(torch.equal(out, outputs[0]) for out in outputs)
    assert outputs[0].isfinite().all()


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize(("block", "spans"), [(attention.QUERY_BLOCK, attention.KEY_SPANS), (32, 8), (16, 2)])
@pytest.mark.parametrize("heads", [2, 6])
def test_ragged_rows_that_begin(
    heads: int, block: int, spans: int, poison: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cache: in one block of queries; in several, the last of them not full, each with keys of its own
    length; in blocks of which three look at the same keys.
    """
    monkeypatch.setattr(attention, "QUERY_BLOCK", block)
    monkeypatch.setattr(attention, "KEY_SPANS", spans)
    lengths = torch.tensor([LENGTH, 33, 1, 0])
    key, value = (normal(4, KV_HEADS, LENGTH, DIM, seed=seed) for seed in (1, 2))
    query = normal(4, heads, LENGTH, DIM, seed=3)
    padding = (torch.arange(LENGTH) >= lengths[:, None])[:, None, :, None]
    out = segment_attention(query, *(torch.where(padding, poison, x) for x in (key, value)), lengths)
    assert out.shape == (4, LENGTH, heads, DIM)
    for row, length in enumerate(lengths[:3].tolist()):
        said = (x[row, :, :length] for x in (query, key, value))
        assert relative(out[row, :length], expected_attention(*said)) < 1e-6


def test_a_large_score_does_not_overflow() -> None:
    """Softmax subtracts the largest score."""
    query, key = 1e3 * normal(1, 4, 9, DIM, seed=1), 1e3 * normal(1, KV_HEADS, 9, DIM, seed=2)
    value = normal(1, KV_HEADS, 9, DIM, seed=3)
    out = cached_attention(query, key, value, torch.tensor([0]), torch.tensor([9]))
    assert relative(out[0], expected_attention(query[0], key[0], value[0])) < 1e-5


def test_bfloat16_softmax_is_float32() -> None:
    query, key = normal(1, 4, 40, DIM, seed=1).bfloat16(), normal(1, KV_HEADS, 40, DIM, seed=2).bfloat16()
    value = normal(1, KV_HEADS, 40, DIM, seed=3).bfloat16()
    out = cached_attention(query, key, value, torch.tensor([0]), torch.tensor([40]))
    assert out.dtype == torch.bfloat16
    exact = expected_attention(query[0].float(), key[0].float(), value[0].float())
    assert relative(out[0], exact) < 2**-7
