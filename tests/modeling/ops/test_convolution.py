"""The causal convolution against Hugging Face's own function, and its state against the last valid inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

from nxdi_qwen.modeling.ops.convolution import causal_convolution
from tests.comparison import relative

CHANNELS = 14
KERNELS = [3, 4, 5]


def hf_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Hugging Face's convolution and silu over whole rows: x [B, T, C] -> [B, T, C]."""
    return causal_conv1d_fn(x.transpose(1, 2), weight, None, activation="silu").transpose(1, 2)


def make(rows: int, tokens: int, kernel: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, T, C], weight [C, K] and the empty state [B, C, K - 1]."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(rows, tokens, CHANNELS, generator=generator).to(dtype)
    weight = torch.randn(CHANNELS, kernel, generator=generator).to(dtype)
    return x, weight, torch.zeros(rows, CHANNELS, kernel - 1, dtype=dtype)


def last_inputs(x: Tensor, kernel: int) -> Tensor:
    """The last kernel - 1 of the inputs x [T, C], zeros on the old side: [C, kernel - 1]."""
    return torch.cat([x.new_zeros(kernel - 1, CHANNELS), x])[-(kernel - 1) :].T


def lengths_of(*lengths: int) -> Tensor:
    return torch.tensor(lengths)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 65])
def test_from_nothing(tokens: int, kernel: int) -> None:
    x, weight, state = make(3, tokens, kernel)
    out, states = causal_convolution(x, weight.T, state, lengths_of(tokens, tokens, tokens), (tokens,))
    assert relative(out, hf_convolution(x, weight)) < 1e-6
    assert len(states) == 1
    for row in range(3):
        assert torch.equal(states[0][row], last_inputs(x[row], kernel))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("pieces", [(1, 1, 1, 1, 1, 1), (2, 1, 3, 2), (7, 9, 1)], ids=str)
def test_continuation(pieces: tuple[int, ...], kernel: int) -> None:
    x, weight, state = make(3, sum(pieces), kernel)
    outputs, begin = [], 0
    for size in pieces:
        part = x[:, begin : begin + size]
        out, (state,) = causal_convolution(part, weight.T, state, lengths_of(size, size, size), (size,))
        outputs.append(out)
        begin += size
    assert relative(torch.cat(outputs, dim=1), hf_convolution(x, weight)) < 1e-6
    assert torch.equal(state, torch.stack([last_inputs(row, kernel) for row in x]))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("given", [False, True], ids=["empty state", "given state"])
def test_ragged_rows(given: bool, kernel: int, poison: float) -> None:
    """What stands behind a row's length reaches neither its outputs nor its state, which is the old one at length 0."""
    lengths = [7, 1, 2, 0]
    past, weight, state = make(4, 9, kernel)
    x = make(4, 8, kernel)[0]
    if given:
        state = torch.stack([last_inputs(row, kernel) for row in past])
    dirty = torch.where(torch.arange(8)[:, None] < torch.tensor(lengths)[:, None, None], x, poison)
    out, (new,) = causal_convolution(dirty, weight.T, state, lengths_of(*lengths), (8,))
    for row, length in enumerate(lengths):
        whole = torch.cat([past[row], x[row, :length]]) if given else x[row, :length]
        if length:
            assert relative(out[row, :length], hf_convolution(whole[None], weight)[0, -length:]) < 1e-6
        assert torch.equal(new[row], last_inputs(whole, kernel))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_state_for_every_end(kernel: int) -> None:
    """After that many tokens, or after the last valid one of a shorter row."""
    lengths, ends = [10, 4, 1, 0], (1, 2, 3, 6, 10)
    x, weight, _ = make(4, 10, kernel)
    past = make(4, 9, kernel)[0]
    state = torch.stack([last_inputs(row, kernel) for row in past])
    _, states = causal_convolution(x, weight.T, state, lengths_of(*lengths), ends)
    assert len(states) == len(ends)
    for end, new in zip(ends, states, strict=True):
        for row, length in enumerate(lengths):
            seen = torch.cat([past[row], x[row, : min(length, end)]])
            assert torch.equal(new[row], last_inputs(seen, kernel))


@pytest.mark.parametrize("kernel", KERNELS)
def test_bfloat16(kernel: int) -> None:
    """One rounding before silu and one after, as in torch's own convolution: at most one unit in the last place off."""
    x, weight, state = make(3, 40, kernel, torch.bfloat16)
    out, (new,) = causal_convolution(x, weight.T, state, lengths_of(40, 40, 40), (40,))
    assert out.dtype == new.dtype == torch.bfloat16
    expected = hf_convolution(x, weight)
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-5)
    assert (out == expected).float().mean() > 0.99
