"""The eager model against Hugging Face in float32, for every fixture: all logits within 1e-5 of the largest one."""

from __future__ import annotations

import copy

import pytest
import torch

from tests import scenarios
from tests.comparison import bits
from tests.hf_fixtures import FIXTURES, hf_model, nested_model, reference_logits
from tests.scenarios import GROUPS, LAYOUTS, LENGTHS, PREFIXES
from tests.support import (
    DECODE_STEPS,
    EagerForward,
    Engine,
    assert_close,
    eager,
    load,
    reference_decode,
    reference_prefill,
    tokens_of,
)

NAMES = list(FIXTURES)
FORMS = [
    ("qwen3_next", {"stacked": True}),
    ("qwen3_5", {"nested": True}),
    ("qwen3_5_tied", {"nested": True}),
    ("qwen3_5_moe", {"nested": True, "stacked": True, "shards": 3}),
    ("qwen3_5_moe_tied", {"nested": True}),
]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", NAMES)
def test_one_row_without_padding(name: str, length: int) -> None:
    scenarios.one_row(eager(name), name, length)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", GROUPS)
@pytest.mark.parametrize("name", NAMES)
def test_ragged_batch_then_decode(name: str, lengths: tuple[int, ...], layout: str) -> None:
    turn = (NAMES.index(name) + GROUPS.index(lengths)) % 3
    steps = DECODE_STEPS if layout == LAYOUTS[turn] else 2  # each prompt is decoded at length after one of the layouts
    scenarios.ragged_batch(eager(name), name, lengths, layout, max(lengths) + 41, steps)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("name", NAMES)
def test_prompt_cut_anywhere(name: str, prefix: int) -> None:
    layout = LAYOUTS[(NAMES.index(name) + PREFIXES.index(prefix)) % 3]
    scenarios.continued_in_pieces(eager(name), name, prefix, layout)


@pytest.mark.parametrize("name", NAMES)
def test_joins_and_leaves(name: str) -> None:
    scenarios.joins_and_leaves(eager(name), name)


@pytest.mark.parametrize("name", NAMES)
def test_decode_rows_that_name_their_slots(name: str) -> None:
    """As many rows as requests, in an order of their own, and a request that starts with its decode step."""
    engine = Engine(eager(name))
    lengths = {3: 129, 1: 5}
    engine.prefill({slot: tokens_of(name, slot)[:length] for slot, length in lengths.items()})
    lengths[4] = 0
    for step in range(3):
        tokens = {slot: int(tokens_of(name, slot)[lengths[slot] + step]) for slot in (1, 4, 3)}
        for slot, logits in engine.decode(tokens, row_is_slot=False).items():
            if slot == 4:
                expected = reference_prefill(name, slot, step + 1)[-1]
            else:
                expected = reference_decode(name, slot, lengths[slot])[step + 1]
            assert_close(logits, expected, (slot, step))


@pytest.mark.parametrize(("name", "form"), FORMS, ids=["-".join([name, *form]) for name, form in FORMS])
def test_checkpoint_forms(name: str, form: dict[str, object]) -> None:
    model = hf_model(name)
    forward = EagerForward(load(model, **form))
    assert_same_weights(forward, eager(name))
    reference = nested_model(model) if "nested" in form else model
    ids = tokens_of(name, 0)[:70]
    result = Engine(forward).prefill({1: ids}, "left", 100)[1]
    assert_close(result.every, reference_logits(reference, ids), form)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_wide"])
def test_every_epsilon_counts(name: str) -> None:
    """Inputs so small that each norm's epsilon is as large as what it is added to; elsewhere it drowns in rounding."""
    model = copy.deepcopy(hf_model(name))
    for key, parameter in model.named_parameters():
        if any(part in key for part in ("embed_tokens", "conv1d", "q_proj", "k_proj")):
            parameter.data *= 1e-3
    ids = tokens_of(name, 0)[:70]
    result = Engine(EagerForward(load(model))).prefill({1: ids})[1]
    assert_close(result.every, reference_logits(model, ids), "small inputs")


def assert_same_weights(actual: EagerForward, expected: EagerForward) -> None:
    assert actual.weights.keys() == expected.weights.keys()
    for key, tensor in expected.weights.items():
        assert torch.equal(bits(actual.weights[key]), bits(tensor)), key
