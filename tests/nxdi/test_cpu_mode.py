"""The real NxDI in its CPU mode beside Hugging Face: rows alone, static batches, continuous batching."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.layers.context import Context
from tests.nxdi.calls import (
    Requests,
    check,
    fill_state,
    relative,
    replay,
    same_bits,
    slot_state,
    unloaded,
)
from tests.nxdi.references import DECODE_STEPS, FAMILY_NAMES, LENGTHS, NAMES, Prompt, reference

pytestmark = pytest.mark.nxdi

App = Callable[..., Any]
ALONE: dict[str, Any] = {"batch_size": 1}
STATIC: dict[str, Any] = {"batch_size": 4}
CONTINUOUS: dict[str, Any] = {
    "batch_size": 4,
    "ctx_batch_size": 1,
    "tkg_batch_size": 4,
    "is_continuous_batching": True,
}
PERMUTED = (2, 0, 3, 1)
# Who decodes in each step of continuous batching, over and over.
TURNS: tuple[Sequence[int], ...] = (PERMUTED, (1,), (3, 0), (0, 2, 1), (2, 3), (1, 3, 2, 0))


def ragged(name: str, slots: Sequence[int] = range(4)) -> dict[int, Prompt]:
    """The prompts of lengths 3, 130, 1 and 64, by slot."""
    return dict(zip(slots, reference(name).ragged, strict=True))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", NAMES)
def test_a_row_alone(cpu_app: App, name: str, length: int) -> None:
    app, prompts = cpu_app(name, **ALONE), {0: reference(name).prompts[length]}
    fill_state(app, [0], torch.nan)
    check(replay(Requests(app), prompts), prompts)


@pytest.mark.parametrize("name", NAMES)
def test_a_static_batch(cpu_app: App, name: str) -> None:
    app, prompts = cpu_app(name, **STATIC), ragged(name)
    check(replay(Requests(app), prompts), prompts)


@pytest.mark.parametrize("options", [STATIC, CONTINUOUS], ids=["static", "continuous"])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_batch_without_attention_mask(cpu_app: App, name: str, options: dict[str, Any]) -> None:
    prompts = ragged(name, PERMUTED)
    check(replay(Requests(cpu_app(name, **options), masked=False), prompts, steps=4), prompts)


@pytest.mark.parametrize("name", NAMES)
def test_slots_that_decode_by_turns(cpu_app: App, name: str) -> None:
    """Requests come one by one, in any order, and only some of them get a token in each step."""
    app, prompts = cpu_app(name, **CONTINUOUS), ragged(name, PERMUTED)
    requests = Requests(app)
    logits: dict[int, list[Tensor]] = {}
    for slot, prompt in prompts.items():
        logits[slot] = [requests.prefill({slot: prompt.ids})[0]]
    turn = 0
    while waiting := [slot for slot, rows in logits.items() if len(rows) <= DECODE_STEPS]:
        active = [slot for slot in TURNS[turn % len(TURNS)] if slot in waiting]
        turn += 1
        if not active:
            continue
        idle = [slot for slot in prompts if slot not in active]
        before = slot_state(app, idle)
        tokens = {slot: int(prompts[slot].continuation[len(logits[slot]) - 1]) for slot in active}
        for slot, row in zip(active, requests.decode(tokens), strict=True):
            logits[slot].append(row)
        assert same_bits(slot_state(app, idle), before)
    check({slot: torch.stack(rows) for slot, rows in logits.items()}, prompts)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_several_prompts_in_one_call_go_one_by_one(cpu_app: App, name: str) -> None:
    """Context encoding has a batch size of 1: NxDI cuts the call."""
    prompts = ragged(name, PERMUTED)
    check(replay(Requests(cpu_app(name, **CONTINUOUS)), prompts), prompts)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_used_slot_starts_anew(cpu_app: App, name: str) -> None:
    """NaN in all of a slot's state reaches neither the request that gets it next nor those beside it."""
    app, prompts = cpu_app(name, **CONTINUOUS), ragged(name)
    requests = Requests(app)
    replay(requests, prompts, steps=1)
    for slot, prompt in prompts.items():
        others = [other for other in prompts if other != slot]
        fill_state(app, [slot], torch.nan)
        before = slot_state(app, others)
        logits = replay(requests, {slot: prompt}, steps=4)
        assert same_bits(slot_state(app, others), before)
        check(logits, {slot: prompt})


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_prompt_of_fewer_rows_than_the_batch(cpu_app: App, name: str) -> None:
    """NxDI fills the batch with repetitions of the first row; they must not touch the slots that they name."""
    app, prompts = cpu_app(name, **STATIC), ragged(name)
    requests = Requests(app)
    replay(requests, prompts, steps=1)
    before = slot_state(app, [0, 3])
    new = {2: prompts[1], 1: prompts[2]}
    check(replay(requests, new, steps=4), new)
    assert same_bits(slot_state(app, [0, 3]), before)


@pytest.mark.parametrize("options", [ALONE, STATIC, CONTINUOUS], ids=["alone", "static", "continuous"])
@pytest.mark.parametrize("masked", [True, False], ids=["mask", "no mask"])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_prompt_of_one_token(cpu_app: App, name: str, masked: bool, options: dict[str, Any]) -> None:
    prompts = {0: reference(name).prompts[1]}
    check(replay(Requests(cpu_app(name, **options), masked), prompts, steps=4), prompts)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_seq_ids_may_be_left_out(cpu_app: App, name: str) -> None:
    app, prompts = cpu_app(name, **ALONE), {0: reference(name).prompts[1]}
    requests = Requests(lambda seq_ids, **inputs: app(**inputs))
    check(replay(requests, prompts, steps=1), prompts)


def test_positions_that_could_be_those_of_one_token_or_two_need_a_mask(cpu_app: App) -> None:
    app = cpu_app("qwen3_5", **STATIC)
    positions = torch.tensor([[0, 1, 1], [0, 1, 2]])
    with pytest.raises(InputError, match="pass attention_mask"):
        app(input_ids=torch.ones_like(positions), position_ids=positions)


# --- Controls: each breaks the port, and the comparison above must say so.


def valid_by_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    from nxdi_qwen.modeling.nxdi.model import NeuronHybridModel

    original = NeuronHybridModel.get_model_output

    def broken(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        positions = kwargs["position_ids"]
        counted = positions[:, :1] + torch.arange(positions.shape[1])
        return original(self, input_ids, *args, **kwargs | {"attention_mask": positions == counted})

    monkeypatch.setattr(NeuronHybridModel, "get_model_output", broken)


def everything_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(context: Context) -> Tensor:
        return torch.ones(context.cos.shape[:2], dtype=torch.bool)

    monkeypatch.setattr(Context, "valid", property(broken))


def state_not_threaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from nxdi_qwen.modeling.nxdi.causal_lm import NeuronHybridForCausalLM

    monkeypatch.setattr(NeuronHybridForCausalLM, "_copy_past_key_values", lambda self, outputs: None)


def idle_rows_active(monkeypatch: pytest.MonkeyPatch) -> None:
    from nxdi_qwen.modeling.nxdi.wrapper import HybridModelWrapper

    original = HybridModelWrapper._forward

    def broken(self: Any, ids: Tensor, mask: Tensor, positions: Tensor, seq_ids: Tensor, *args: Any) -> Any:
        named = torch.where(seq_ids < 0, torch.arange(len(seq_ids)), seq_ids)
        return original(self, ids, mask, positions, named, *args)

    monkeypatch.setattr(HybridModelWrapper, "_forward", broken)


@pytest.mark.parametrize("fault", [state_not_threaded, everything_valid])
@pytest.mark.parametrize("test", [test_a_row_alone, test_a_static_batch, test_slots_that_decode_by_turns])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_control_a_broken_port(
    cpu_app: App,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    test: Callable[..., None],
    fault: Callable[[pytest.MonkeyPatch], None],
) -> None:
    argument = (3,) if test is test_a_row_alone else ()
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=r"relative errors|states differ"):
        test(cpu_app, name, *argument)


def test_control_idle_rows(cpu_app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    idle_rows_active(monkeypatch)
    for test in (test_slots_that_decode_by_turns, test_a_prompt_of_fewer_rows_than_the_batch):
        with pytest.raises(AssertionError):
            test(cpu_app, "qwen3_5")


@pytest.mark.parametrize("length", [1, 2, 65])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_control_positions_do_not_tell_what_is_valid(
    cpu_app: App, monkeypatch: pytest.MonkeyPatch, name: str, length: int
) -> None:
    """NxDI pads positions with 1: with validity taken from them, a prompt of one token becomes one of two."""
    valid_by_positions(monkeypatch)
    wrong: AbstractContextManager[Any] = pytest.raises(AssertionError, match="relative errors")
    with wrong if length == 1 else nullcontext():
        test_a_row_alone(cpu_app, name, length)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_control_one_weight_is_off_by_a_hundredth(cpu_app: App, name: str) -> None:
    """Tokens do not show it."""
    app, prompt = cpu_app(name, **ALONE), reference(name).prompts[65]
    weight = app.context_encoding_model.model.layers[-1].self_attn.o_proj.weight.data
    kept = weight.clone()
    weight *= 1.01
    try:
        logits = replay(Requests(app), {0: prompt})[0]
    finally:
        weight.copy_(kept)
    assert torch.equal(logits.argmax(-1), prompt.logits.argmax(-1))
    assert relative(logits, prompt.logits) > 1e-4
    with pytest.raises(AssertionError, match="relative errors"):
        check({0: logits}, {0: prompt})
    check(replay(Requests(app), {0: prompt}), {0: prompt})


# --- Loading


@pytest.mark.parametrize("options", [ALONE, CONTINUOUS], ids=["alone", "continuous"])
@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_loaded_and_nothing_else(cpu_app: App, name: str, options: dict[str, Any]) -> None:
    """NxDI loads with strict=False in CPU mode, and would not tell."""
    app = cpu_app(name, **options)
    assert len(app.models) == 2
    for model in app.models:
        assert unloaded(app, model.model) == []


@pytest.mark.parametrize("part", ["layers.1.", "layers.3.mlp", "lm_head", "embed_tokens", "rope", "rank_util"])
def test_control_a_parameter_that_is_not_loaded(cpu_app: App, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    app = cpu_app("qwen3_5_moe", **ALONE)
    rest = {name: tensor for name, tensor in app.checkpoint_loader_fn().items() if not name.startswith(part)}
    monkeypatch.setattr(app, "checkpoint_loader_fn", lambda: dict(rest))
    missing = unloaded(app, app.context_encoding_model.model)
    assert missing and all(name.startswith(part) for name in missing)
