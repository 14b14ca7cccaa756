"""Requests in slots against Hugging Face: eager, exported programs, and compiled with AOTInductor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from nxdi_qwen.compile.cpu import GraphExecutor
from nxdi_qwen.compile.executor import Executor
from nxdi_qwen.compile.slot_runner import SlotRunner
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.model import Batch, State, text_positions
from tests.artifacts import FAMILY_NAMES, MAX_LENGTH, SLOTS, Served, served, short_model
from tests.hf_fixtures import FIXTURES, prompt_ids, reference_logits

TOLERANCE = 1e-5
LENGTHS = (1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, 200)
STEPS = 24
FORMS = [
    *(("eager", name) for name in FIXTURES if name not in FAMILY_NAMES),
    *(("exported", name) for name in FAMILY_NAMES),
    *(pytest.param(("optimized", name), marks=pytest.mark.slow) for name in FAMILY_NAMES),
]


@pytest.fixture(scope="module", params=FORMS, ids="-".join)
def each(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return served(tmp_path_factory, *request.param)


@pytest.fixture(scope="module", params=[("exported", "qwen3_5"), ("eager", "qwen3_5_moe")], ids="-".join)
def some(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return served(tmp_path_factory, *request.param)


@functools.cache
def tokens(model: PreTrainedModel, seed: int) -> list[int]:
    return prompt_ids(model, MAX_LENGTH, seed).tolist()


@functools.cache
def reference(model: PreTrainedModel, seed: int) -> Tensor:
    """Logits [MAX_LENGTH, V] after every token of prompt `seed`."""
    return reference_logits(model, torch.tensor(tokens(model, seed)))


def rel(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def bits(logits: Tensor) -> Tensor:
    return logits.view(torch.int32)


def test_prefill(each: Served) -> None:
    model, executor = each
    runner = SlotRunner(executor)
    for number, length in enumerate(LENGTHS):
        slot, seed = number % SLOTS, number % 2
        expected = reference(model, seed)[:length]
        assert rel(runner.prefill_all_logits(slot, tokens(model, seed)[:length]), expected) <= TOLERANCE, length
        assert rel(runner.prefill(slot, tokens(model, seed)[:length]), expected[-1]) <= TOLERANCE, length
        assert runner.lengths[slot] == length


@pytest.mark.parametrize("length", [1, 3, 40])
@pytest.mark.parametrize("layout", ["left", "interior"])
def test_padding_may_stand_anywhere(each: Served, layout: str, length: int) -> None:
    """The runner pads on the right; the graphs take any mask. Then a decode step, from the state that this leaves."""
    model, executor = each
    bucket = executor.buckets.lengths[0]
    places = torch.arange(bucket - length, bucket) if layout == "left" else torch.arange(length) + bucket // 3
    ids, valid = torch.full((1, bucket), 7), torch.zeros(1, bucket, dtype=torch.bool)
    ids[0, places], valid[0, places] = torch.tensor(tokens(model, 1)[:length]), True
    start = torch.tensor([0])
    runner = SlotRunner(executor)
    batch = Batch(ids, valid, text_positions(start, valid), start, torch.tensor([1]))
    logits, hidden, runner.state = executor.context(batch, runner.state)
    expected = reference(model, 1)
    assert rel(logits[0], expected[length - 1]) <= TOLERANCE
    assert rel(executor.head(hidden[0, places]), expected[:length]) <= TOLERANCE
    runner.lengths[1] = length
    assert rel(runner.decode({1: tokens(model, 1)[length]})[1], expected[length]) <= TOLERANCE


def test_joins_and_leaves(each: Served) -> None:
    """Nine requests on three slots; one that has had its steps gives its slot to the next; sometimes a slot idles."""
    model, executor = each
    runner = SlotRunner(executor)
    waiting = iter([(seed, length, steps) for seed, (length, steps) in enumerate(
        [(63, 24), (1, 6), (129, 24), (2, 5), (64, 1), (200, 24), (3, 7), (65, 2), (100, 4)]
    )])  # fmt: skip
    running: dict[int, tuple[int, int]] = {}  # slot -> prompt, steps left
    step = 0
    while True:
        for slot in range(SLOTS):
            if slot not in running and (request := next(waiting, None)):
                seed, length, steps = request
                logits = runner.prefill(slot, tokens(model, seed)[:length])
                assert rel(logits, reference(model, seed)[length - 1]) <= TOLERANCE, request
                running[slot] = seed, steps
        if not running:
            break
        # Every fourth step the first of the running ones waits.
        active = sorted(running)[1:] if step % 4 == 3 and len(running) > 1 else sorted(running)
        before = {slot: runner.lengths[slot] for slot in running}
        logits_of = runner.decode({slot: tokens(model, running[slot][0])[before[slot]] for slot in active})
        assert sorted(logits_of) == active
        for slot, logits in logits_of.items():
            seed, left = running[slot]
            assert rel(logits, reference(model, seed)[before[slot]]) <= TOLERANCE, (seed, before[slot])
            running[slot] = seed, left - 1
        running = {slot: request for slot, request in running.items() if request[1]}
        step += 1
    assert step > 12


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_compiled_graphs_return_what_graphs_take(
    name: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contiguous tensors; torch 2.9 laid the state out like what was written to it."""
    model, executor = served(tmp_path_factory, "optimized", name)
    assert isinstance(executor, GraphExecutor)
    called = set()

    def watched(graph: str, call: Callable[..., object]) -> Callable[..., object]:
        def run_graph(*inputs: object) -> object:
            outputs = call(*inputs)
            called.add(graph)
            for number, output in enumerate(tree_leaves(outputs)):
                assert output.is_contiguous(), (graph, number, output.shape, output.stride())
            return outputs

        return run_graph

    calls = {graph: watched(graph, call) for graph, call in executor.model._calls.items()}
    monkeypatch.setattr(executor.model, "_calls", calls)
    runner = SlotRunner(executor)
    runner.prefill_all_logits(0, tokens(model, 0)[:70])
    runner.decode({0: 1})
    assert called == set(calls)


def run(runner: SlotRunner, slot: int, ids: list[int], length: int, neighbours: dict[int, Iterator[int]]) -> Tensor:
    """Logits [1 + STEPS, V] of a request; the neighbours decode along."""
    logits = [runner.prefill(slot, ids[:length])]
    for token in ids[length : length + STEPS]:
        logits.append(runner.decode({slot: token} | {other: next(more) for other, more in neighbours.items()})[slot])
    return torch.stack(logits)


def alone(executor: Executor, slot: int, ids: list[int], length: int) -> Tensor:
    return run(SlotRunner(executor), slot, ids, length, {})


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -3e38])
def test_what_a_freed_slot_held_changes_no_bit(some: Served, poison: float) -> None:
    model, executor = some
    for slot, length in ((1, 1), (0, 2), (2, 70)):
        runner = SlotRunner(executor)
        for tensor in runner.state:
            tensor[slot] = poison
        got = run(runner, slot, tokens(model, 0), length, {})
        assert torch.equal(bits(got), bits(alone(executor, slot, tokens(model, 0), length))), (slot, length)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_idle_slots_and_later_positions_hold_changes_no_bit(some: Served, poison: float) -> None:
    model, executor = some
    length = 70
    expected = alone(executor, 1, tokens(model, 0), length)
    runner = SlotRunner(executor)
    runner.prefill(1, tokens(model, 0)[:length])
    runner.state = [tensor.clone() for tensor in runner.state]  # the eager executor's may not be changed in place
    for described, tensor in zip(executor.description.tensors, runner.state, strict=True):
        tensor[0] = tensor[2] = poison
        if described.role in ("key", "value"):
            tensor[1, :, length:] = poison
    got = [runner.decode({1: token})[1] for token in tokens(model, 0)[length : length + STEPS]]
    assert torch.equal(bits(torch.stack(got)), bits(expected[1:]))


def test_neighbours_change_no_bit(some: Served) -> None:
    """In the same slot, that is; another slot is another row of every matrix product, and rounds differently."""
    model, executor = some
    for length in (1, 65):
        for slot in range(SLOTS):
            expected = alone(executor, slot, tokens(model, 0), length)
            runner = SlotRunner(executor)
            others = {}
            for other in set(range(SLOTS)) - {slot}:
                runner.prefill(other, tokens(model, 1 + other)[: 20 + other])
                others[other] = iter(tokens(model, 1 + other)[20 + other :])
            got = run(runner, slot, tokens(model, 0), length, others)
            assert torch.equal(bits(got), bits(expected)), (slot, length)


def test_idle_slots_keep_every_bit(some: Served) -> None:
    model, executor = some
    runner = SlotRunner(executor)
    for slot in range(SLOTS):
        runner.prefill(slot, tokens(model, slot)[:5])
    before = [tensor.clone() for tensor in runner.state]
    runner.decode({1: 7})
    runner.prefill(1, tokens(model, 3)[:70])
    for old, new in zip(before, runner.state, strict=True):
        assert torch.equal(bits(old[[0, 2]]), bits(new[[0, 2]]))
        assert not torch.equal(old[1], new[1])
    assert runner.lengths == [5, 70, 5]


def test_a_slot_takes_as_many_tokens_as_the_maximum_length(some: Served) -> None:
    model, executor = some
    runner = SlotRunner(executor)
    runner.prefill(0, tokens(model, 0)[: MAX_LENGTH - 1])
    logits = runner.decode({0: tokens(model, 0)[MAX_LENGTH - 1]})[0]
    assert rel(logits, reference(model, 0)[-1]) <= TOLERANCE
    assert rel(runner.prefill(1, tokens(model, 1)), reference(model, 1)[-1]) <= TOLERANCE
    for slot, held in ((0, MAX_LENGTH), (1, MAX_LENGTH), (2, 0)):
        with pytest.raises(InputError, match=f"slot {slot} holds {held} tokens"):
            runner.decode({slot: 1})
    assert runner.lengths == [MAX_LENGTH, MAX_LENGTH, 0]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the prompt is empty"),
        ([1] * (MAX_LENGTH + 1), f"has {MAX_LENGTH + 1} tokens, at most {MAX_LENGTH} fit"),
        ([3, 272], "token id 272 at position 1 is outside the vocabulary of 272"),
        ([-1, 3], "token id -1 at position 0 is outside the vocabulary of 272"),
    ],
)
def test_prompts_that_cannot_be_served(some: Served, ids: list[int], message: str) -> None:
    runner = SlotRunner(some.executor)
    with pytest.raises(InputError, match=message):
        runner.prefill(0, ids)
    assert runner.lengths == [0] * SLOTS


def test_all_logits_hold_those_that_generation_begins_from(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The context graph computes them on its own: the head graph, right as it may be, says nothing about them."""
    _, executor = served(tmp_path_factory, "exported", "qwen3_5")
    context = executor.context

    def wrong(batch: Batch, state: State) -> tuple[Tensor, Tensor, State]:
        logits, hidden, new = context(batch, state)
        return logits.flip(1), hidden, new

    ids = tokens(short_model("qwen3_5"), 0)[:70]
    right = SlotRunner(executor).prefill_all_logits(0, ids)
    monkeypatch.setattr(executor, "context", wrong)
    found = SlotRunner(executor).prefill_all_logits(0, ids)
    differ = (found != right).any(dim=1).nonzero().flatten().tolist()
    assert differ == [63, 69], "after the last token of each piece"
