"""The two-level scan against the float64 recurrence, and which form a prompt takes."""

from __future__ import annotations

import pytest
import torch

from nxdi_qwen.modeling.ops import chunk_scan, gated_delta
from nxdi_qwen.modeling.ops.chunk_scan import SERIAL_CHUNKS, group_size, serial_is_cheaper
from nxdi_qwen.modeling.ops.gated_delta import CHUNK, gated_delta_prefill
from tests.comparison import relative
from tests.modeling.ops.test_gated_delta import KEYS, MASKS, Inputs, make_inputs, reference


@pytest.fixture
def two_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form of long prompts, for short ones."""
    monkeypatch.setattr(gated_delta, "serial_is_cheaper", lambda chunks: False)


def small(tokens: int, keys: str = "random") -> Inputs:
    return make_inputs(tokens, rows=1, key_heads=1, ratio=2, keys=keys)


@pytest.mark.usefixtures("two_level")
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("tokens", [257, 320, 400, 700])
def test_against_the_recurrence(tokens: int, keys: str) -> None:
    inputs = small(tokens, keys)
    expected, expected_state = reference(inputs)
    out, (state,) = gated_delta_prefill(*inputs.call(), MASKS)
    assert relative(out, expected) <= 1e-5
    assert relative(state, expected_state) <= 1e-5


def test_a_prompt_that_takes_it() -> None:
    """One chunk more than a serial scan takes, and the last chunk not full."""
    inputs = small(SERIAL_CHUNKS * CHUNK + 3)
    expected, expected_state = reference(inputs)
    out, (state,) = gated_delta_prefill(*inputs.call(), MASKS)
    assert relative(out, expected) <= 1e-5
    assert relative(state, expected_state) <= 1e-5


@pytest.mark.usefixtures("two_level")
@pytest.mark.parametrize("checkpoints", [(64,), (64, 192, 256), (128, 384)], ids=str)
def test_checkpoints(checkpoints: tuple[int, ...]) -> None:
    inputs = small(400)
    _, states = gated_delta_prefill(*inputs.call(), MASKS, checkpoints=checkpoints)
    assert len(states) == len(checkpoints) + 1
    for end, state in zip((*checkpoints, 400), states, strict=True):
        assert relative(state, reference(inputs.tokens(slice(0, end)))[1]) <= 1e-5


@pytest.mark.usefixtures("two_level")
def test_strong_decay_and_padding() -> None:
    """Whole chunks that forget everything, and whole chunks of padding that hold NaN."""
    inputs = small(400)
    inputs.log_decay[:, 100:200] = -50.0
    inputs.valid[:, 300:] = False
    inputs.value[:, 300:] = torch.nan
    expected, expected_state = reference(inputs)
    out, (state,) = gated_delta_prefill(*inputs.call(), MASKS)
    assert relative(out[:, :300], expected[:, :300]) <= 1e-5
    assert relative(state, expected_state) <= 1e-5


def test_the_form_by_length() -> None:
    assert serial_is_cheaper(2048 // CHUNK) and not serial_is_cheaper(2048 // CHUNK + 1)
    for chunks in (33, 64, 100, 512):
        size = group_size(chunks)
        assert size + -(-chunks // size) == min(group + -(-chunks // group) for group in range(1, chunks + 1))
    assert group_size(512) + 512 // group_size(512) <= 46


def test_it_is_the_two_level_form_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_scan, "group_size", lambda chunks: chunks // 0)
    gated_delta_prefill(*small(SERIAL_CHUNKS * CHUNK).call(), MASKS)
    with pytest.raises(ZeroDivisionError):
        gated_delta_prefill(*small(SERIAL_CHUNKS * CHUNK + 1).call(), MASKS)
