"""This package's model with the parameters of a Hugging Face fixture, and what tests of it share."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nxdi_qwen.modeling.model import Batch, HybridCausalLM, State, text_positions
from nxdi_qwen.modeling.state import describe_state
from tests.hf_fixtures import hf_model
from tests.support import load


def port(hf: PreTrainedModel) -> HybridCausalLM:
    """The same model in float32, through a checkpoint folder."""
    config, weights = load(hf)
    model = HybridCausalLM(config, torch.float32)
    model.load_state_dict(weights)
    return model.eval()


@functools.cache
def ported_model(name: str) -> HybridCausalLM:
    """The fixture `name`, ported. Cached: do not change a parameter."""
    return port(hf_model(name))


def empty_state(model: HybridCausalLM, slots: int, max_length: int) -> State:
    return describe_state(model.config, slots, max_length, torch.float32).allocate()


def owned_state(model: HybridCausalLM, state: State, slot: int, length: int) -> dict[str, Tensor]:
    """What a request of `length` tokens owns in its slot, by name: keys and values up to its length only."""
    rows = {}
    for tensor, value in zip(describe_state(model.config, 1, 1, torch.float32).tensors, state, strict=True):
        own = value[slot]
        rows[tensor.name] = own[:, :length] if tensor.role in ("key", "value") else own
    return rows


def batch_of(rows: list[Tensor], starts: list[int], width: int | None = None, slots: list[int] | None = None) -> Batch:
    """Right-padded rows of token ids (an empty one is idle), each behind `starts` tokens that its slot holds."""
    width = width or max(len(row) for row in rows)
    ids = torch.stack([torch.cat([row, row.new_zeros(width - len(row))]) for row in rows])
    valid = torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]
    start = torch.tensor(starts)
    return Batch(ids, valid, text_positions(start, valid), start, None if slots is None else torch.tensor(slots))


def step_by_step(model: HybridCausalLM, ids: Tensor, state: State, start: int = 0) -> tuple[Tensor, list[State]]:
    """Decode `ids` [T] in slot 0 one by one: logits [T, V], and the state after each token."""
    logits, states = [], []
    for offset, token in enumerate(ids):
        out, state = model.decode(batch_of([token[None]], [start + offset]), state)
        logits.append(out[0])
        states.append(state)
    return torch.stack(logits), states
