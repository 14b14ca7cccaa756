"""The cutting rule for every public model at every degree, with numbered entries instead of weights."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
from torch import Tensor

from nxdi_qwen.modeling.config import FULL_ATTENTION, LINEAR_ATTENTION, ModelConfig
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.partition import (
    SINGLE,
    Cut,
    Over,
    Parallel,
    allowed_degrees,
    check_degree,
    local_shape,
    put_part,
    take_part,
)
from nxdi_qwen.modeling.presets import PRESETS
from nxdi_qwen.modeling.state import cut_state, describe_state, merge_state
from nxdi_qwen.modeling.weights import weight_cuts, weight_specs
from tests.modeling.weights.synthetic import make_config

NO_EXPERTS = {"num_experts": 0, "num_experts_per_tok": 0, "shared_expert_intermediate_size": None}
POWERS = [1, 2, 4, 8, 16, 32, 64]
# GDN value heads -> the largest degree. 48: at 32 ranks a quarter of the places are empty, at 64 likewise.
LARGEST = {16: 16, 32: 32, 48: 64, 64: 64}


def short(name: str) -> ModelConfig:
    """One layer of each kind, everything else as published."""
    layers = (LINEAR_ATTENTION, FULL_ATTENTION)
    config = PRESETS[name]
    return dataclasses.replace(config, num_hidden_layers=2, layer_types=layers, moe_layers=config.moe_layers[:2])


def distinct() -> list[str]:
    """One name of each shape: releases that differ in names and constants only are the same case."""
    shapes: dict[tuple[object, ...], str] = {}
    for name, config in PRESETS.items():
        sizes = [(key, value) for key, value in vars(config).items() if type(value) is int and "num_hidden" not in key]
        shapes.setdefault(tuple(sizes), name)
    return list(shapes.values())


NAMES = distinct()


def expert_degrees(config: ModelConfig, degree: int) -> list[int]:
    return [groups for groups in POWERS if degree % groups == 0] if config.num_experts else [1]


def cases() -> list[tuple[str, int]]:
    return [(name, degree) for name in NAMES for degree in allowed_degrees(PRESETS[name])]


@functools.cache
def cuts_of(name: str) -> dict[str, tuple[Cut, ...]]:
    return weight_cuts(short(name), SINGLE)


def numbered(cuts: tuple[Cut, ...]) -> tuple[Tensor, tuple[Cut, ...]]:
    """Entries numbered from 1 along the dimensions that are cut (0 is filling), and the cuts of that tensor."""
    sizes = [cut.size for cut in cuts]
    moved = tuple(dataclasses.replace(cut, dim=dim) for dim, cut in enumerate(cuts))
    return torch.arange(1, math.prod(sizes) + 1).view(sizes), moved


def parts_of(cuts: tuple[Cut, ...], degree: int, expert_degree: int = 1) -> list[Tensor]:
    whole, moved = numbered(cuts)
    return [take_part(whole, moved, Parallel(degree, rank, expert_degree)) for rank in range(degree)]


def test_degrees_of_every_public_model() -> None:
    for config in PRESETS.values():
        largest = LARGEST[config.linear_num_value_heads]
        assert allowed_degrees(config) == [degree for degree in POWERS if degree <= largest]
        for degree in allowed_degrees(config):
            for groups in expert_degrees(config, degree):
                check_degree(config, degree, groups)


@pytest.mark.parametrize("name", PRESETS)
def test_every_other_degree_is_refused_with_the_reason(name: str) -> None:
    config = PRESETS[name]
    heads = config.linear_num_value_heads
    for degree in range(-1, 67):
        if degree in allowed_degrees(config):
            continue
        if not 1 <= degree <= 64:
            reason = f"degree {degree} is out of range: use 1 to 64"
        elif degree == 48 and heads > 16:  # fits the heads
            reason = f"degree 48 does not divide vocab_size {config.vocab_size}"
        elif degree in (*POWERS, 48):
            reason = f"degree {degree} is refused: {heads} GDN value heads would fill at most half of the ranks' places"
        else:
            reason = f"degree {degree} does not fit linear_num_key_heads 16: use a divisor or a multiple of it"
        with pytest.raises(InputError, match=reason) as refusal:
            check_degree(config, degree)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("family", "changes", "degree", "expert_degree", "message"),
    [
        ("qwen3_5", {"num_key_value_heads": 3, "num_attention_heads": 6}, 2, 1, "does not fit num_key_value_heads 3"),
        ("qwen3_5", {"intermediate_size": 25}, 2, 1, "degree 2 does not divide intermediate_size 25"),
        ("qwen3_5", {"vocab_size": 33}, 2, 1, "degree 2 does not divide vocab_size 33"),
        ("qwen3_5", NO_EXPERTS, 2, 2, "expert degree 2 is for models with experts: leave it out"),
        ("qwen3_5_moe", {}, 2, 1, "degree 2 does not divide shared_expert_intermediate_size 7"),
        ("qwen3_5_moe", {"shared_expert_intermediate_size": 8}, 2, 1, "2 ranks to an expert do not divide moe_int.* 5"),
        ("qwen3_5_moe", {"shared_expert_intermediate_size": 8}, 2, 2, "expert degree 2 does not divide num_experts 3"),
        ("qwen3_5_moe", {}, 4, 3, "expert degree 3 does not divide degree 4"),
        ("qwen3_5_moe", {}, 4, 0, "expert degree 0 does not divide degree 4"),
    ],
)
def test_sizes_that_do_not_fit(
    family: str, changes: dict[str, int | None], degree: int, expert_degree: int, message: str
) -> None:
    config = make_config(family, **changes)
    with pytest.raises(InputError, match=message):
        check_degree(config, degree, expert_degree)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_does_not_exist(rank: int) -> None:
    with pytest.raises(InputError, match=f"rank {rank} does not exist at degree 4"):
        Parallel(4, rank)


def copies(cut: Cut, degree: int, expert_degree: int) -> int:
    """How many ranks hold each entry, as far as this cut alone says."""
    ranks = {Over.ALL: degree, Over.EXPERT: expert_degree, Over.TENSOR: degree // expert_degree}[cut.over]
    return max(1, ranks // cut.groups) if cut.shared else 1


@pytest.mark.parametrize(("name", "degree"), cases())
def test_the_ranks_together_are_the_whole(name: str, degree: int) -> None:
    """Each entry is on one rank, and on as many as share a group where it is a shared head; nothing else is there."""
    config, cuts = short(name), cuts_of(name)
    whole = weight_specs(config, torch.bfloat16)
    for groups in expert_degrees(config, degree):
        local = weight_specs(config, torch.bfloat16, Parallel(degree, 0, groups))
        for parameter, of in cuts.items():
            if not of:
                assert local[parameter] == whole[parameter]
                continue
            if groups > 1 and ".experts." not in parameter:
                continue  # cut over all ranks whatever the groups
            parts = parts_of(of, degree, groups)
            assert all(whole[parameter][0][cut.dim] == cut.size for cut in of), parameter
            assert {tuple(part.shape) for part in parts} == {tuple(local[parameter][0][cut.dim] for cut in of)}
            held = torch.bincount(torch.cat([part.flatten() for part in parts]))[1:]
            expected = math.prod(copies(cut, degree, groups) for cut in of)
            assert held.shape[0] == math.prod(cut.size for cut in of) and (held == expected).all(), parameter
            if expected > 1:
                for rank, part in enumerate(parts):
                    assert torch.equal(part, parts[rank // expected * expected]), "neighbours share a head"


def heads_of(part: Tensor, unit: int) -> list[int]:
    """The heads of a part, place by place; -1 for an empty place. Every head is whole and in order."""
    heads = []
    for place in part.view(-1, unit):
        assert (place == 0).all() or torch.equal(place, torch.arange(unit) + place[0])
        assert place[0] == 0 or (place[0] - 1) % unit == 0
        heads.append((int(place[0]) - 1) // unit if place[0] else -1)
    return heads


@pytest.mark.parametrize(("name", "degree"), cases())
def test_heads_stay_with_their_group(name: str, degree: int) -> None:
    """A rank's value head at place i belongs to its key head at place i // ratio, as the layer pairs them; the same
    for query and KV heads. All parameters of a head are on the same rank, at the same place.
    """
    config, cuts = short(name), cuts_of(name)
    dk, dv, d = config.linear_key_head_dim, config.linear_value_head_dim, config.head_dim
    gdn, attention = "layers.0.linear_attn.", "layers.1.self_attn."
    keys = {f"{part}_{kind}.weight": dk for part in "qk" for kind in ("proj", "conv")}
    values = dict.fromkeys(("v_proj.weight", "z_proj.weight", "v_conv.weight", "out_proj.weight"), dv)
    values |= dict.fromkeys(("b_proj.weight", "a_proj.weight", "A_log.weight", "dt_bias.weight"), 1)
    kv = {"k_proj.weight": d, "v_proj.weight": d}
    queries = {"q_proj.weight": 2 * d, "o_proj.weight": d}
    value_ratio = config.linear_num_value_heads // config.linear_num_key_heads
    query_ratio = config.num_attention_heads // config.num_key_value_heads
    for prefix, own, members, ratio in ((gdn, keys, values, value_ratio), (attention, kv, queries, query_ratio)):
        parts = {suffix: parts_of(cuts[prefix + suffix], degree) for suffix in own | members}
        for rank in range(degree):
            own_heads, member_heads = (
                [heads_of(parts[suffix][rank], unit) for suffix, unit in kind.items()] for kind in (own, members)
            )
            assert all(heads == own_heads[0] for heads in own_heads) and -1 not in own_heads[0]
            assert all(heads == member_heads[0] for heads in member_heads)
            places = len(member_heads[0]) // len(own_heads[0])
            assert places * len(own_heads[0]) == len(member_heads[0])
            for place, head in enumerate(member_heads[0]):
                assert head == -1 or head // ratio == own_heads[0][place // places]


@pytest.mark.parametrize(("name", "degree"), cases())
def test_state(name: str, degree: int) -> None:
    """Shapes and bytes, counted here from the head counts; and cutting and merging lose nothing."""
    config, slots, length = short(name), 2, 3
    whole = describe_state(config, slots, length, torch.float32)
    parallel = Parallel(degree)
    own = describe_state(config, slots, length, torch.float32, parallel)
    heads, key_heads, kv_heads = config.linear_num_value_heads, 16, config.num_key_value_heads
    sharers = max(1, degree // key_heads)
    values = heads // degree if degree <= key_heads else math.ceil(heads / key_heads / sharers)
    keys, kv = max(1, key_heads // degree), max(1, kv_heads // degree)
    shapes = {
        "layers.0.recurrent": (slots, values, 128, 128),
        "layers.0.conv": (slots, 2 * keys * 128 + values * 128, 3),
        "layers.1.key": (slots, kv, length, 256),
        "layers.1.value": (slots, kv, length, 256),
    }
    assert {tensor.name: tensor.shape for tensor in own.tensors} == shapes
    assert own.bytes_per_slot == sum(4 * math.prod(shape) for shape in shapes.values()) // slots
    assert sum(t.nbytes for t in own.allocate("meta")) == slots * own.bytes_per_slot

    state = [torch.arange(1, math.prod(t.shape) + 1, dtype=torch.float32).view(t.shape) for t in whole.tensors]
    ranks = [cut_state(state, whole, Parallel(degree, rank)) for rank in range(degree)]
    assert {tuple(tuple(t.shape) for t in rank) for rank in ranks} == {tuple(shapes.values())}
    for merged, original in zip(merge_state(ranks, whole), state, strict=True):
        assert torch.equal(merged, original)

    # The channels of a rank's conv state are those of its taps, segment by segment.
    cuts = cuts_of(name)
    starts = {"q": 0, "k": config.key_dim, "v": 2 * config.key_dim}
    for rank, (_, conv, *_) in enumerate(ranks):
        expected = []
        for segment, start in starts.items():
            channel = parts_of(cuts[f"layers.0.linear_attn.{segment}_conv.weight"], degree)[rank]
            expected.append(torch.where(channel > 0, channel + start, 0))
        channels = torch.cat(expected)
        assert torch.equal(conv[0, :, 0], torch.where(channels > 0, (channels - 1) * 3 + 1, 0).float())


def test_parts_are_put_back() -> None:
    cuts = (Cut(0, 2, 3, 4), Cut(1, 2, shared=True, unit=5))
    whole = torch.arange(24 * 10).view(24, 10)
    again = torch.full_like(whole, -1)
    for rank in range(4):
        part = take_part(whole, cuts, Parallel(4, rank))
        assert tuple(part.shape) == local_shape(whole.shape, cuts, Parallel(4, rank)) == (8, 5)
        put_part(again, part, cuts, Parallel(4, rank))
    # The two dimensions are cut over the same ranks: a rank's rows go with its group's columns only.
    assert torch.equal(again[:12, :5], whole[:12, :5]) and torch.equal(again[12:, 5:], whole[12:, 5:])
    assert (again[:12, 5:] == -1).all()
    with pytest.raises(InputError, match="2 groups of heads or columns do not fit 3 ranks"):
        take_part(whole, cuts, Parallel(3))
