"""What the state consists of, and how rows of a batch read and write their slots."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from nxdi_qwen.modeling.config import FULL_ATTENTION
from nxdi_qwen.modeling.presets import PRESETS
from nxdi_qwen.modeling.state import describe_state, read_slots, write_slots
from tests.hf_fixtures import FIXTURES, hf_model, prompt_ids
from tests.modeling.ported import batch_of, empty_state, owned_state, ported_model

NAN = float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PRESETS)
def test_description(name: str, dtype: torch.dtype) -> None:
    config = PRESETS[name]
    description = describe_state(config, 3, 512, dtype)
    tensors = description.allocate("meta")
    assert [tuple(tensor.shape) for tensor in tensors] == [tensor.shape for tensor in description.tensors]
    assert [tensor.dtype for tensor in tensors] == [tensor.dtype for tensor in description.tensors]
    assert [tensor.nbytes for tensor in tensors] == [3 * tensor.bytes_per_slot for tensor in description.tensors]
    assert sum(tensor.nbytes for tensor in tensors) == 3 * description.bytes_per_slot
    assert len({tensor.name for tensor in description.tensors}) == len(tensors) == 2 * config.num_hidden_layers
    for tensor in description.tensors:
        roles = ("key", "value") if config.layer_types[tensor.layer] == FULL_ATTENTION else ("recurrent", "conv")
        assert tensor.role in roles
        assert tensor.name == f"layers.{tensor.layer}.{tensor.role}"
        assert tensor.dtype == (torch.float32 if tensor.role == "recurrent" else dtype)
    cached = [tensor for tensor in description.tensors if tensor.role in ("key", "value")]
    assert len(cached) == 2 * (config.num_hidden_layers // 4), (
        "every fourth layer, and no others, keeps keys and values"
    )


def test_bytes_by_hand() -> None:
    """Qwen3-Next-80B-A3B in bfloat16: 12 attention and 36 GDN layers."""
    config = PRESETS["qwen3-next-80b-a3b"]
    kv = 12 * 2 * 2 * 256 * 2  # layers, key and value, heads, head_dim, bytes: a token
    recurrent = 36 * 32 * 128 * 128 * 4
    conv = 36 * (2 * 16 * 128 + 32 * 128) * 3 * 2
    assert kv == 24 * 1024
    for length in (1, 4096, 262144):
        assert describe_state(config, 7, length, torch.bfloat16).bytes_per_slot == length * kv + recurrent + conv


@torch.no_grad()
@pytest.mark.parametrize("name", FIXTURES)
def test_shapes_are_those_of_hugging_faces_cache(name: str) -> None:
    """Its conv state has one column more than is needed."""
    model = hf_model(name)
    cache = DynamicCache(config=model.config)
    model(input_ids=prompt_ids(model, 9)[None], cache=cache, use_cache=True)
    for tensor in describe_state(ported_model(name).config, 1, 9, torch.float32).tensors:
        if tensor.role == "recurrent":
            expected = cache.get_recurrent_state(tensor.layer)
        elif tensor.role == "conv":
            expected = cache.get_conv_state(tensor.layer)[..., 1:]
        else:
            layer = cache.layers[tensor.layer]
            expected = layer.keys if tensor.role == "key" else layer.values
        assert tensor.shape == expected.shape, tensor.name
        assert tensor.dtype == expected.dtype, tensor.name


def test_allocation_is_zero() -> None:
    config = ported_model("qwen3_next").config
    assert all(not tensor.any() for tensor in describe_state(config, 2, 8, torch.bfloat16).allocate())


def slots_of(count: int) -> Tensor:
    """Slot s is filled with s + 1."""
    return torch.arange(1.0, count + 1)[:, None, None].expand(-1, 2, 3).contiguous()


def firsts(rows: Tensor) -> list[float]:
    assert torch.equal(rows, rows[:, :1, :1].expand_as(rows))
    return rows[:, 0, 0].tolist()


def test_rows_read_the_slots_they_name() -> None:
    started = torch.tensor([1, 5, 9])
    assert firsts(read_slots(slots_of(5), torch.tensor([3, 0, 4]), started)) == [4.0, 1.0, 5.0]
    assert firsts(read_slots(slots_of(3), None, started)) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("left", [NAN, float("inf"), float("-inf")])
def test_a_new_request_reads_zeros(left: float) -> None:
    state = slots_of(4)
    state[2] = left
    assert firsts(read_slots(state, torch.tensor([2, 1]), torch.tensor([0, 3]))) == [0.0, 2.0]
    assert firsts(read_slots(state, None, torch.tensor([1, 1, 0, 1]))) == [1.0, 2.0, 0.0, 4.0]


def test_rows_write_the_slots_they_name() -> None:
    state, rows = slots_of(5), 10 * slots_of(3)
    active = torch.ones(3, dtype=torch.bool)
    assert firsts(write_slots(state, rows, torch.tensor([3, 0, 4]), active)) == [20.0, 2.0, 3.0, 10.0, 30.0]
    assert firsts(write_slots(slots_of(3), rows, None, active)) == [10.0, 20.0, 30.0]
    assert torch.equal(state, slots_of(5)), "the old state is not written to"


def test_the_last_row_that_names_a_slot_is_written() -> None:
    """As NxDI's warm-up does it: a row's number made of several would lie outside of the rows."""
    rows, active = 10 * slots_of(4), torch.ones(4, dtype=torch.bool)
    assert firsts(write_slots(slots_of(3), rows, torch.tensor([1, 1, 2, 1]), active)) == [1.0, 40.0, 30.0]


@pytest.mark.parametrize("idle", [0, 1, 2])
def test_an_idle_row_writes_nowhere(idle: int) -> None:
    """Not even into the slot of an active row, which it may name, and whatever it holds."""
    rows = 10 * slots_of(3)
    rows[idle] = NAN
    active = torch.arange(3) != idle
    expected = {0: [20.0, 2.0, 30.0, 4.0], 1: [10.0, 2.0, 30.0, 4.0], 2: [10.0, 2.0, 20.0, 4.0]}[idle]
    slots = {0: [0, 0, 2], 1: [0, 2, 2], 2: [0, 2, 0]}[idle]
    assert firsts(write_slots(slots_of(4), rows, torch.tensor(slots), active)) == expected
    assert firsts(write_slots(slots_of(3), rows, None, active)) == [
        row + 1.0 if row == idle else 10.0 * (row + 1) for row in range(3)
    ]
    assert torch.equal(
        write_slots(slots_of(4), rows, torch.tensor(slots), torch.zeros(3, dtype=torch.bool)), slots_of(4)
    )


def test_what_a_slot_held_reaches_no_bit() -> None:
    """Model level: prefill and decode in permuted slots full of NaN, beside a live and an idle row."""
    model, name = ported_model("qwen3_next"), "qwen3_next"
    prompts = [prompt_ids(hf_model(name), length, seed) for seed, length in enumerate((20, 3))]
    nothing = prompts[0][:0]
    results = []
    for left in (0.0, NAN, float("inf")):
        state = [torch.full_like(tensor, left) for tensor in empty_state(model, 4, 30)]
        # The idle row names the slot of the first.
        out = model.prefill(batch_of([*prompts, nothing], [0, 0, 0], slots=[2, 1, 2]), state)
        tokens = [prompts[0][:1], nothing, nothing]
        logits, state = model.decode(batch_of(tokens, [20, 3, 0], width=1, slots=[2, 1, 2]), out.state)
        owned = [owned_state(model, state, slot, length) for slot, length in ((2, 21), (1, 3))]
        results.append([out.logits[:2], logits[:1], *(tensor for row in owned for tensor in row.values())])
        for tensor in state:
            kept = tensor[3].nan_to_num(7.0)
            assert torch.equal(kept, torch.full_like(kept, left).nan_to_num(7.0)), "a slot that no row names"
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


def test_a_slot_is_used_again() -> None:
    """A second request in the slot gets what it would get in a fresh one."""
    model, hf = ported_model("qwen3_5_tied"), hf_model("qwen3_5_tied")
    old, new = prompt_ids(hf, 40, 1), prompt_ids(hf, 2, 2)
    used = model.prefill(batch_of([old], [0]), empty_state(model, 1, 50)).state
    again = model.prefill(batch_of([new], [0]), used)
    fresh = model.prefill(batch_of([new], [0]), empty_state(model, 1, 50))
    assert torch.equal(again.logits, fresh.logits)
    owned = owned_state(model, fresh.state, 0, 2)
    for name, tensor in owned_state(model, again.state, 0, 2).items():
        assert torch.equal(tensor, owned[name]), name
