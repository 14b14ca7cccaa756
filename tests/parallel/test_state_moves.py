"""A state that one degree left goes on at any other."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.config_loader import load_config
from nxdi_qwen.modeling.model import State
from nxdi_qwen.modeling.partition import SINGLE, Parallel, even
from nxdi_qwen.modeling.state import StateDescription, StateTensor, cut_state, describe_state, merge_state
from tests.comparison import bits, relative
from tests.parallel.faults import FAULTS, Case
from tests.parallel.launch import MOVE_DEGREES, MOVES, Results, results
from tests.parallel.worker import MAX_LENGTH, MOVED, SLOTS, rank_states
from tests.support import TOLERANCE, assert_close

pytestmark = pytest.mark.slow
PAIRS = list(itertools.product(MOVE_DEGREES, MOVE_DEGREES))
LIVE = sorted(MOVED)


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results(tmp_path_factory)


def config_of(computed: Results, name: str) -> ModelConfig:
    return load_config(computed.folder / name).config


def description_of(config: ModelConfig, parallel: Parallel = SINGLE) -> StateDescription:
    return describe_state(config, SLOTS, MAX_LENGTH, torch.float32, parallel)


def cut_all(whole: State, description: StateDescription, degree: int) -> list[State]:
    return [cut_state(whole, description, Parallel(degree, rank)) for rank in range(degree)]


def merged(computed: Results, name: str, degree: int) -> State:
    """What `degree` ranks left, as one state."""
    return merge_state(rank_states(computed.folder, name, degree), description_of(config_of(computed, name)))


def same_bits(a: State, b: State) -> bool:
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


def live(state: State, description: StateDescription) -> list[Tensor]:
    """What the slots hold of their requests."""
    held = []
    for tensor, described in zip(state, description.tensors, strict=True):
        cached = described.role in ("key", "value")
        held += [tensor[slot, :, : MOVED[slot]] if cached else tensor[slot] for slot in LIVE]
    return held


def worst(actual: State, expected: State, description: StateDescription) -> float:
    """The largest relative difference of what the slots hold."""
    pairs = zip(live(actual, description), live(expected, description), strict=True)
    return max(relative(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_goes_on_at_another_degree(source: int, target: int, name: str, computed: Results) -> None:
    task = ("arrive", Case(name), source)
    reports = [computed.single[task]] if target == 1 else [rank[task] for rank in computed.ranks[target]]
    for piece in reports[0].pieces:
        expected = computed.expected[name][piece.prompt, piece.begin : piece.begin + len(piece.logits)]
        assert_close(piece.logits, expected, f"{piece.what}, prompt {piece.prompt}, token {piece.begin}")
    assert all(report.kept for report in reports)
    assert len({report.digest for report in reports}) == 1


@pytest.mark.parametrize("name", MOVES)
def test_degrees_leave_the_same_state(name: str, computed: Results) -> None:
    """To rounding where there is a request; NaN, bit by bit, in the slots that none used."""
    description = description_of(config_of(computed, name))
    single, *others = (merged(computed, name, degree) for degree in MOVE_DEGREES)
    for other in others:
        assert worst(other, single, description) <= TOLERANCE
        for tensor in other:
            assert torch.isnan(tensor[[slot for slot in range(SLOTS) if slot not in MOVED]]).all()


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("degree", MOVE_DEGREES[1:])
def test_replicas_are_equal_and_filling_is_zero(degree: int, name: str, computed: Results) -> None:
    """Cutting the merged state gives back every rank's own bits: nothing is held by one rank that a move loses."""
    config = config_of(computed, name)
    states = rank_states(computed.folder, name, degree)
    back = cut_all(merge_state(states, description_of(config)), description_of(config), degree)
    for rank, (own, moved) in enumerate(zip(states, back, strict=True)):
        description = description_of(config, Parallel(degree, rank))
        assert [tensor.shape for tensor in moved] == [tensor.shape for tensor in description.tensors]
        for mine, given in zip(live(own, description), live(moved, description), strict=True):
            assert torch.equal(bits(mine), bits(given))


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_moving_there_and_back_is_exact(first: int, second: int, name: str, computed: Results) -> None:
    """NaN included; and a cut of the state of degree 1 is the cut of the same state after a move."""
    description = description_of(config_of(computed, name))
    whole = rank_states(computed.folder, name, 1)[0]
    at_first = cut_all(whole, description, first)
    at_second = cut_all(merge_state(at_first, description), description, second)
    assert same_bits(merge_state(at_second, description), whole)
    for moved, direct in zip(at_second, cut_all(whole, description, second), strict=True):
        assert same_bits(moved, direct)
    returned = cut_all(merge_state(at_second, description), description, first)
    assert all(same_bits(a, b) for a, b in zip(returned, at_first, strict=True))


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("degree", MOVE_DEGREES)
def test_a_move_to_the_same_degree_changes_no_bit(degree: int, name: str, computed: Results) -> None:
    """Going on from the moved state gives the logits of going on without a move."""
    ranks = [computed.single] if degree == 1 else computed.ranks[degree]
    for rank in ranks:
        assert rank["arrive", Case(name), degree].digest == rank["leave", Case(name)].digest


def test_a_slab_cut_of_the_convolution_shows(computed: Results) -> None:
    """Its q, k and v channels taken as one segment: the shapes are right, the channels are not."""
    name = "four_groups"
    description = description_of(config_of(computed, name))

    def slab(tensor: StateTensor) -> StateTensor:
        size = sum(cut.size for cut in tensor.segments)
        return dataclasses.replace(tensor, segments=(even(1, size),)) if tensor.role == "conv" else tensor

    slabs = dataclasses.replace(description, tensors=tuple(slab(tensor) for tensor in description.tensors))
    wrong = merge_state(rank_states(computed.folder, name, 2), slabs)
    assert worst(wrong, merged(computed, name, 1), description) > 0.1


def test_a_wrong_order_of_the_ranks_shows(computed: Results) -> None:
    name = "four_groups"
    description = description_of(config_of(computed, name))
    wrong = merge_state(rank_states(computed.folder, name, 2)[::-1], description)
    assert worst(wrong, merged(computed, name, 1), description) > 0.1


def test_members_across_groups_show(computed: Results) -> None:
    """Value heads dealt out contiguously, whatever their key head."""
    name = "qwen3_next_mixed"
    description = description_of(config_of(computed, name))
    with FAULTS["value heads are cut across groups"].loading():
        wrong = merge_state(rank_states(computed.folder, name, 4), description)
    assert worst(wrong, merged(computed, name, 1), description) > 0.1
