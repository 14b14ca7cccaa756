"""Verification of drafts against one decode step after the other, and checkpoints against shorter prefills."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nxdi_qwen.modeling.model import State, text_positions
from tests.comparison import relative
from tests.hf_fixtures import hf_model, prompt_ids, reference_logits, reference_steps
from tests.modeling.ported import batch_of, empty_state, owned_state, ported_model, step_by_step

MAX_LENGTH, SLOTS = 210, 5
NAMES = ["qwen3_next", "qwen3_next_mixed", "qwen3_5_tied", "qwen3_5_moe"]
PROMPT_LENGTHS, ROW_SLOTS, IDLE = [70, 1, 33], [3, 0, 4], 2


def prompt(name: str, row: int, length: int) -> Tensor:
    return prompt_ids(hf_model(name), length, seed=row)


def assert_same_state(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert relative(tensor, expected[name]) <= 1e-5, name


def prefilled(name: str) -> State:
    """Three prompts in three of five slots; the other slots hold NaN."""
    model = ported_model(name)
    state = [torch.full_like(tensor, float("nan")) for tensor in empty_state(model, SLOTS, MAX_LENGTH)]
    prompts = [prompt(name, row, length) for row, length in enumerate(PROMPT_LENGTHS)]
    return model.prefill(batch_of(prompts, [0, 0, 0], slots=ROW_SLOTS), state).state


@pytest.mark.parametrize("drafts", [1, 3, 7])
@pytest.mark.parametrize("name", NAMES)
def test_verify_is_decode_with_every_state(name: str, drafts: int) -> None:
    """Ragged rows, one of them idle; then each row goes on from the token before its first rejected one."""
    model, state = ported_model(name), prefilled(name)
    counts = [drafts + 1, max(1, drafts - 1), drafts]
    drafted = [prompt(name, 10 + row, count) for row, count in enumerate(counts)]
    batch = batch_of([*drafted, drafted[0][:0]], [*PROMPT_LENGTHS, 0], width=drafts + 1, slots=[*ROW_SLOTS, IDLE])
    logits, states = model.verify(batch, state)
    assert logits.shape == (4, drafts + 1, model.config.vocab_size)
    assert len(states) == drafts + 1
    for after in states:
        for old, new in zip(state, after, strict=True):
            assert torch.equal(new[1].nan_to_num(7.0), old[1].nan_to_num(7.0)), "a slot that no row names"
            assert torch.equal(new[IDLE].nan_to_num(7.0), old[IDLE].nan_to_num(7.0)), "an idle row's slot"

    for row, (slot, length, count) in enumerate(zip(ROW_SLOTS, PROMPT_LENGTHS, counts, strict=True)):
        alone = [tensor[slot : slot + 1] for tensor in state]
        expected, expected_states = step_by_step(model, drafted[row], alone, start=length)
        assert relative(logits[row, :count], expected) <= 1e-5
        for end, after in enumerate(states):
            taken = min(end + 1, count)
            own = owned_state(model, after, slot, length + taken)
            assert_same_state(own, owned_state(model, expected_states[taken - 1], 0, length + taken))


@pytest.mark.parametrize("name", NAMES)
def test_after_a_rejection(name: str) -> None:
    """Accept some drafts and put another token in place of the rest: Hugging Face never saw the rejected ones."""
    model, state, drafts = ported_model(name), prefilled(name), 3
    drafted = [prompt(name, 10 + row, drafts + 1) for row in range(3)]
    other = [prompt(name, 20 + row, 2) for row in range(3)]
    _, states = model.verify(batch_of(drafted, PROMPT_LENGTHS, slots=ROW_SLOTS), state)
    references = []
    for row, length in enumerate(PROMPT_LENGTHS):
        taken = row + 1  # row 0 keeps one token, row 2 three
        said = torch.cat([drafted[row][:taken], other[row]])
        references.append(reference_steps(hf_model(name), prompt(name, row, length), said).logits[-2:])
    for row, (slot, length) in enumerate(zip(ROW_SLOTS, PROMPT_LENGTHS, strict=True)):
        now = states[row]
        for step in range(2):
            start = length + row + 1 + step
            logits, now = model.decode(batch_of([other[row][step : step + 1]], [start], slots=[slot]), now)
            assert relative(logits[0], references[row][step]) <= 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_prefill_after_verify(name: str) -> None:
    """Verification leaves a state that any way can go on from."""
    model, state = ported_model(name), prefilled(name)
    drafted, more = prompt(name, 10, 4), prompt(name, 20, 67)
    _, states = model.verify(batch_of([drafted], [70], slots=[3]), state)
    out = model.prefill(batch_of([more], [72], slots=[3]), states[1])
    reference = reference_steps(hf_model(name), torch.cat([prompt(name, 0, 70), drafted[:2], more]), drafted[:0])
    assert relative(out.logits[0], reference.logits[-1]) <= 1e-5


@pytest.mark.parametrize("left", [False, True], ids=["right padding", "left padding"])
@pytest.mark.parametrize("name", NAMES)
def test_checkpoints(name: str, left: bool) -> None:
    """The state at 64 and 128 tokens of a prompt is that of a prompt of this length; a shorter row's is its last."""
    model, lengths, points = ported_model(name), [150, 100, 30], (64, 128)
    prompts = [prompt(name, row, length) for row, length in enumerate(lengths)]
    batch = batch_of(prompts, [0, 0, 0], slots=ROW_SLOTS)
    if left:
        valid = batch.valid.flip(1)
        rolled = [row.roll(150 - length) for row, length in zip(batch.input_ids, lengths, strict=True)]
        batch = batch._replace(
            input_ids=torch.stack(rolled), valid=valid, rope_positions=text_positions(batch.start, valid)
        )
    out = model.prefill(batch, empty_state(model, SLOTS, MAX_LENGTH), checkpoints=points)
    plain = model.prefill(batch, empty_state(model, SLOTS, MAX_LENGTH))
    assert torch.equal(out.logits, plain.logits)
    assert all(torch.equal(a, b) for a, b in zip(out.state, plain.state, strict=True))
    for row, ids in enumerate(prompts):
        assert relative(out.logits[row], reference_logits(hf_model(name), ids)[-1]) <= 1e-5
    assert len(out.checkpoints) == len(points)
    for point, checkpoint in zip(points, out.checkpoints, strict=True):
        for row, (slot, length) in enumerate(zip(ROW_SLOTS, lengths, strict=True)):
            seen = min(point, length)
            shorter = model.prefill(batch_of([prompts[row][:seen]], [0]), empty_state(model, 1, MAX_LENGTH)).state
            assert_same_state(owned_state(model, checkpoint, slot, seen), owned_state(model, shorter, 0, seen))


@pytest.mark.parametrize("points", [(100,), (128, 64), (64, 64), (0,), (192,)], ids=str)
def test_checkpoints_off_the_grid_are_refused(points: tuple[int, ...]) -> None:
    """Off it, the recurrent state would be that of the chunk before."""
    model = ported_model("qwen3_5_tied")
    batch = batch_of([prompt("qwen3_5_tied", 0, 150)], [0])
    with pytest.raises(ValueError, match="are not ascending multiples of 64 below T"):
        model.prefill(batch, empty_state(model, 1, MAX_LENGTH), checkpoints=points)


def test_going_on_from_a_checkpoint() -> None:
    """What a prefix cache does: the rest of another prompt behind the first 64 tokens of this one."""
    name = "qwen3_5_tied"
    model, hf = ported_model(name), hf_model(name)
    first, other = prompt(name, 0, 150), prompt(name, 1, 20)
    out = model.prefill(batch_of([first], [0]), empty_state(model, 1, MAX_LENGTH), checkpoints=(64, 128))
    for point, state in zip((64, 128), out.checkpoints, strict=True):
        rest = model.prefill(batch_of([other], [point]), state)
        assert (
            relative(rest.logits[0], reference_steps(hf, torch.cat([first[:point], other]), other[:0]).logits[0])
            <= 1e-5
        )
