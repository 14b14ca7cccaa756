"""The gated delta rule in its three ways against the float64 recurrence, token by token."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from nxdi_qwen.modeling.ops.gated_delta import (
    CHUNK,
    ChunkMasks,
    gated_delta_prefill,
    gated_delta_verify,
    solve_unit_lower,
)
from tests.comparison import relative
from tests.twin import gated_delta_recurrence

MASKS = ChunkMasks.build(torch.device("cpu"))
LENGTHS = [1, 2, 3, 63, 64, 65, 127, 128, 129, 200]
KEYS = ["random", "identical", "nearly identical"]


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call, as the convolution and the gates leave them: q and k not normalised."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor
    state: Tensor
    valid: Tensor

    def call(self) -> tuple[Tensor, ...]:
        return (self.query, self.key, self.value, self.log_decay, self.beta, self.state, self.valid)

    def tokens(self, index: slice | Tensor) -> Inputs:
        """Some tokens of all rows, from the same state."""
        names = ("query", "key", "value", "log_decay", "beta", "valid")
        return replace(self, **{name: getattr(self, name)[:, index] for name in names})


def make_inputs(
    tokens: int, rows: int = 3, key_heads: int = 2, ratio: int = 3, dk: int = 12, dv: int = 20, keys: str = "random"
) -> Inputs:
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    heads = key_heads * ratio
    key = normal(rows, tokens, key_heads, dk)
    if keys != "random":
        key = key[:, :1].expand(-1, tokens, -1, -1) + (keys == "nearly identical") * 0.01 * key
    return Inputs(
        query=normal(rows, tokens, key_heads, dk),
        key=key,
        value=normal(rows, tokens, heads, dv),
        log_decay=-0.05 * torch.rand(rows, tokens, heads, generator=generator),
        beta=torch.rand(rows, tokens, heads, generator=generator),
        state=0.5 * normal(rows, heads, dk, dv),
        valid=torch.ones(rows, tokens, dtype=torch.bool),
    )


def reference(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Output [B, T, Hv, dv] and final state in float64, each row on its own over its valid tokens; zeros elsewhere."""
    ratio = inputs.value.shape[2] // inputs.key.shape[2]
    source = [head // ratio for head in range(inputs.value.shape[2])]

    def normalise(x: Tensor) -> Tensor:
        x = x.double()
        return (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt())[:, source]

    outputs, states = torch.zeros(inputs.value.shape, dtype=torch.float64), []
    for row, valid in enumerate(inputs.valid):
        q, k, v, g, b = (x[row, valid] for x in inputs.call()[:5])
        outputs[row, valid], state = gated_delta_recurrence(
            normalise(q) * q.shape[-1] ** -0.5, normalise(k), v, g, b, inputs.state[row]
        )
        states.append(state)
    return outputs, torch.stack(states)


def check(inputs: Inputs, tolerance: float = 1e-5) -> None:
    """Prefill and the step-by-step form against the recurrence: output and final state."""
    expected, expected_state = reference(inputs)
    for form in (lambda *x: gated_delta_prefill(*x, MASKS), gated_delta_verify):
        out, states = form(*inputs.call())
        assert out.dtype == states[-1].dtype == torch.float32
        assert out.shape == inputs.value.shape
        out = torch.where(inputs.valid[..., None, None], out, 0.0)
        assert relative(out, expected) <= tolerance
        assert relative(states[-1], expected_state) <= tolerance


@pytest.mark.parametrize("ratio", [2, 3])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_any_length_from_any_state(tokens: int, ratio: int) -> None:
    check(make_inputs(tokens, ratio=ratio), tolerance=2e-6)


@pytest.mark.parametrize("dims", [(20, 12), (32, 32), (8, 128)])
def test_head_dims(dims: tuple[int, int]) -> None:
    check(make_inputs(70, dk=dims[0], dv=dims[1]), tolerance=2e-6)


@pytest.mark.parametrize("zero_state", [True, False], ids=["zero state", "given state"])
@pytest.mark.parametrize("g", [0.0, -0.01, -0.1, -2.0, -90.0])
@pytest.mark.parametrize("beta", [0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("keys", ["identical", "nearly identical"])
def test_repeated_keys(keys: str, beta: float, g: float, zero_state: bool) -> None:
    """The prompt of one repeated token: what a power series for the inverse, or exp(c_i) * exp(-c_j), cannot do."""
    inputs = make_inputs(300, rows=1, ratio=2, keys=keys)
    inputs = replace(
        inputs,
        log_decay=torch.full_like(inputs.log_decay, g),
        beta=torch.full_like(inputs.beta, beta),
        state=inputs.state * (not zero_state),
    )
    check(inputs)


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("weak", [-0.01, -1e-4])
@pytest.mark.parametrize("period", [2, 7, 50])
def test_strong_decays_among_weak_ones(period: int, weak: float, keys: str) -> None:
    """A difference of cumulative sums has lost the weak decays' digits once a few strong ones went into the sums."""
    inputs = make_inputs(300, rows=1, keys=keys)
    strong = torch.arange(300) % period == 1
    inputs = replace(inputs, log_decay=torch.where(strong[:, None], -90.0, weak).expand_as(inputs.log_decay))
    check(inputs)


def test_a_decay_that_leaves_nothing_is_finite() -> None:
    inputs = make_inputs(130)
    check(replace(inputs, log_decay=torch.full_like(inputs.log_decay, -1e4)))


def test_keys_and_queries_of_zero() -> None:
    """The epsilon stands inside the root: zeros stay zeros."""
    inputs = make_inputs(70)
    scale = torch.where(torch.arange(70) % 3 == 0, 0.0, 1.0)[:, None, None]
    check(replace(inputs, query=inputs.query * scale, key=inputs.key * scale), tolerance=2e-6)
    tiny = replace(inputs, query=inputs.query * 1e-3, key=inputs.key * 1e-3)
    check(tiny, tolerance=2e-6)


def test_value_head_reads_key_head_j_over_r() -> None:
    """Only key head 1 holds anything, so only its value heads, the second half, may answer or write."""
    inputs = make_inputs(5, key_heads=2, ratio=3)
    only = torch.tensor([0.0, 1.0])[:, None]
    inputs = replace(inputs, query=inputs.query * only, key=inputs.key * only, state=torch.zeros_like(inputs.state))
    for out, states in (gated_delta_prefill(*inputs.call(), MASKS), gated_delta_verify(*inputs.call())):
        assert out[:, :, :3].abs().max() == 0
        assert states[-1][:, :3].abs().max() == 0
        assert out[:, :, 3:].abs().amin(dim=(0, 1, 3)).min() > 0
        assert states[-1][:, 3:].abs().amin(dim=(0, 2, 3)).min() > 0


def test_sixteen_bit_inputs_are_computed_in_float32() -> None:
    inputs = make_inputs(70)
    rounded = replace(inputs, **{name: getattr(inputs, name).bfloat16() for name in ("query", "key", "value")})
    check(rounded, tolerance=2e-6)


def padded(inputs: Inputs, width: int, positions: list[Tensor], poison: float) -> Inputs:
    """Row i's valid tokens moved to `positions[i]` of `width`; everything else holds `poison`."""
    index = torch.zeros(len(positions), width, dtype=torch.int64)
    valid = torch.zeros(len(positions), width, dtype=torch.bool)
    for row, where in enumerate(positions):
        index[row, where] = torch.arange(len(where))
        valid[row, where] = True
    rows = torch.arange(len(positions))[:, None]

    def place(x: Tensor) -> Tensor:
        return torch.where(valid.reshape(*valid.shape, *[1] * (x.dim() - 2)), x[rows, index], poison)

    names = ("query", "key", "value", "log_decay", "beta")
    return replace(inputs, valid=valid, **{name: place(getattr(inputs, name)) for name in names})


PLACES = {
    "right": lambda length, width: torch.arange(length),
    "left": lambda length, width: torch.arange(width - length, width),
    "interior": lambda length, width: (
        torch.randperm(width, generator=torch.Generator().manual_seed(length))[:length].sort().values
    ),
}


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf"), 1e30])
@pytest.mark.parametrize("width", [5, 130])
@pytest.mark.parametrize("where", PLACES)
def test_invalid_positions_change_nothing(where: str, width: int, poison: float) -> None:
    """Bit for bit what clean padding gives, and the recurrence over the valid tokens; one row has none."""
    lengths = [width - 2, width // 2, 0]
    positions = [PLACES[where](length, width) for length in lengths]
    inputs = make_inputs(width)
    clean, dirty = padded(inputs, width, positions, 0.0), padded(inputs, width, positions, poison)
    check(dirty, tolerance=2e-6)
    for form in (lambda *x: gated_delta_prefill(*x, MASKS), gated_delta_verify):
        (out, states), (dirty_out, dirty_states) = form(*clean.call()), form(*dirty.call())
        assert torch.equal(out, dirty_out)
        assert all(torch.equal(a, b) for a, b in zip(states, dirty_states, strict=True))
        assert torch.equal(dirty_states[-1][2], inputs.state[2]), "a row without a token keeps its state to the bit"


def test_rows_do_not_depend_on_each_other() -> None:
    inputs = make_inputs(100)
    alone = Inputs(*(x[1:2] for x in inputs.call()))
    others_empty = Inputs(*(torch.stack([torch.zeros_like(x[0]), x[1], torch.zeros_like(x[2])]) for x in inputs.call()))
    for form in (lambda *x: gated_delta_prefill(*x, MASKS), gated_delta_verify):
        out, states = form(*inputs.call())
        assert relative(form(*alone.call())[0], out[1:2]) < 1e-6
        assert torch.equal(form(*others_empty.call())[0][1], out[1])
        assert torch.equal(form(*others_empty.call())[1][-1][1], states[-1][1])


@pytest.mark.parametrize(
    "pieces", [[64, 64, 72], [1, 199], [63, 65, 72], [100, 3, 97], [199, 1], [7] * 28 + [4]], ids=str
)
def test_continuation_in_pieces(pieces: list[int]) -> None:
    inputs = make_inputs(200)
    expected, expected_state = reference(inputs)
    outputs, begin, state = [], 0, inputs.state
    for size in pieces:
        part = replace(inputs.tokens(slice(begin, begin + size)), state=state)
        out, (state,) = gated_delta_prefill(*part.call(), MASKS)
        outputs.append(out)
        begin += size
    assert relative(torch.cat(outputs, dim=1), expected) <= 2e-6
    assert relative(state, expected_state) <= 2e-6


@pytest.mark.parametrize("tokens", [129, 192, 300])
@pytest.mark.parametrize("checkpoints", [(64,), (128,), (64, 128), (64, 128, 192, 256)], ids=str)
def test_checkpoints_are_states_of_shorter_prefills(tokens: int, checkpoints: tuple[int, ...]) -> None:
    checkpoints = tuple(point for point in checkpoints if point < tokens)
    inputs = make_inputs(tokens)
    out, states = gated_delta_prefill(*inputs.call(), MASKS, checkpoints=checkpoints)
    plain, (final,) = gated_delta_prefill(*inputs.call(), MASKS)
    assert len(states) == len(checkpoints) + 1
    assert torch.equal(out, plain)
    assert torch.equal(states[-1], final)
    for point, state in zip(checkpoints, states, strict=False):
        shorter = inputs.tokens(slice(0, point))
        assert relative(state, gated_delta_prefill(*shorter.call(), MASKS)[1][0]) <= 1e-6
        assert relative(state, reference(shorter)[1]) <= 2e-6


def test_verify_returns_the_state_after_every_token() -> None:
    inputs = make_inputs(8)
    out, states = gated_delta_verify(*inputs.call())
    assert len(states) == 8
    state = inputs.state
    for t in range(8):
        step = replace(inputs.tokens(slice(t, t + 1)), state=state)
        one, (state,) = gated_delta_verify(*step.call())
        assert torch.equal(one[:, 0], out[:, t])
        assert torch.equal(state, states[t])
        assert relative(state, reference(inputs.tokens(slice(0, t + 1)))[1]) <= 2e-6


@pytest.mark.parametrize(
    ("keys", "beta", "tolerance"),
    [
        ("random", 0.5, 2e-7),
        ("random", 1.0, 2e-7),
        ("identical", 1.0, 2e-7),
        ("identical", 0.99, 2e-7),
        ("identical", 0.5, 2e-7),
        ("nearly identical", 0.95, 2e-6),
    ],
)
def test_inverse(keys: str, beta: float, tolerance: float) -> None:
    """The table of the design notes: entries of the true inverse are at most 1, a power series is off by up to 7e10."""
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(4, CHUNK, 32, generator=generator)
    if keys != "random":
        k = k[:, :1] + (keys == "nearly identical") * 0.01 * k
    k = k / k.norm(dim=-1, keepdim=True)
    strictly_lower = (beta * k @ k.transpose(1, 2)).tril(-1)
    expected = torch.linalg.solve_triangular(
        torch.eye(CHUNK) + strictly_lower.double(), torch.eye(CHUNK, dtype=torch.float64).expand(4, -1, -1), upper=False
    )
    (actual,) = solve_unit_lower(strictly_lower, (torch.eye(CHUNK).expand(4, -1, -1),), MASKS)
    error = (actual.double() - expected).abs().max().item()
    print(f"{keys} keys, beta {beta}: error of the inverse {error:.1e}, largest entry {expected.abs().max():.2f}")
    assert error <= tolerance
    assert torch.equal(actual.triu(1), torch.zeros_like(actual))
    assert torch.equal(actual.diagonal(dim1=1, dim2=2), torch.ones(4, CHUNK))
