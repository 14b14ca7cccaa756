"""Calls of an NxDI application as its users make them, and their logits beside the stored references.

Nothing here imports NxDI: tests that use it are collected, and skipped with their reason, where NxDI is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests.nxdi.references import DECODE_STEPS, Prompt

LIMIT = 1e-5
MAX_LENGTH = 160  # the longest prompt, its continuation or 24 tokens of its own, and a little


class Requests:
    """Requests in the slots of an application; `lengths` holds the tokens of each.

    `masked`: calls pass `attention_mask`, and pad positions with 1 as NxDI's generation adapter does. Otherwise they
    leave it out and pad with 0, as vLLM does.
    """

    def __init__(self, app: Any, masked: bool = True) -> None:
        self.app, self.masked = app, masked
        self.lengths: dict[int, int] = {}

    @torch.no_grad()
    def prefill(self, prompts: Mapping[int, Tensor]) -> Tensor:
        """One row for each slot, padded on the right to the longest: logits [rows, V]."""
        valid = pad_sequence([torch.ones_like(ids) for ids in prompts.values()], batch_first=True)
        ids = pad_sequence(list(prompts.values()), batch_first=True)
        positions = torch.arange(ids.shape[1]).where(valid > 0, int(self.masked))
        self.lengths |= {slot: len(prompt) for slot, prompt in prompts.items()}
        return self._call(ids, positions, valid, prompts)

    @torch.no_grad()
    def decode(self, tokens: Mapping[int, int]) -> Tensor:
        """One more token for each slot named: logits [rows, V]."""
        ids = torch.tensor(list(tokens.values()))[:, None]
        positions = torch.tensor([self.lengths[slot] for slot in tokens])[:, None]
        for slot in tokens:
            self.lengths[slot] += 1
        valid = (torch.arange(int(positions.max()) + 1) <= positions).to(torch.int64)
        return self._call(ids, positions, valid, tokens)

    def _call(self, ids: Tensor, positions: Tensor, valid: Tensor, slots: Mapping[int, Any]) -> Tensor:
        mask = valid if self.masked else None
        output = self.app(input_ids=ids, position_ids=positions, attention_mask=mask, seq_ids=torch.tensor(list(slots)))
        # Sampled on the device, there are tokens [rows] and no logits.
        return output.tokens if output.logits is None else output.logits[:, -1].clone()


def replay(requests: Requests, prompts: Mapping[int, Prompt], steps: int = DECODE_STEPS) -> dict[int, Tensor]:
    """The prompts in one call, then `steps` tokens of all continuations: by slot the first of `Prompt.logits`."""
    logits = [requests.prefill({slot: prompt.ids for slot, prompt in prompts.items()})]
    for step in range(steps):
        logits.append(requests.decode({slot: int(prompt.continuation[step]) for slot, prompt in prompts.items()}))
    return dict(zip(prompts, torch.stack(logits, dim=1), strict=True))


def relative(actual: Tensor, expected: Tensor) -> float:
    """Of logits [..., V], step by step: the largest difference over the largest |expected logit|; the worst step's."""
    assert actual.shape == expected.shape
    errors = (actual - expected).abs().amax(dim=-1) / expected.abs().amax(dim=-1)
    return errors.max().item()


def check(actual: Mapping[int, Tensor], prompts: Mapping[int, Prompt]) -> None:
    """Fails unless the logits of all slots are those of their prompts, as far as they go."""
    errors = {slot: relative(actual[slot], prompt.logits[: len(actual[slot])]) for slot, prompt in prompts.items()}
    assert all(error <= LIMIT for error in errors.values()), f"relative errors by slot: {errors}"


def state_of(app: Any) -> list[Tensor]:
    """The state tensors of an application, [slots, ...] each; all submodels must hold the same."""
    first, *others = [[state.data for state in model.model.kv_mgr.past_key_values] for model in app.models]
    assert all(same_bits(first, other) for other in others), "the submodels' states differ"
    return first


def fill_state(app: Any, slots: Sequence[int], value: float) -> None:
    """Writes `value` over the whole state of some slots."""
    for model in app.models:
        for tensor in model.model.kv_mgr.past_key_values:
            tensor.data = tensor.data.clone()
            tensor.data[list(slots)] = value


def slot_state(app: Any, slots: Sequence[int]) -> list[Tensor]:
    """A copy of the state of some slots."""
    return [tensor[list(slots)].clone() for tensor in state_of(app)]


def same_bits(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32)) for a, b in pairs)


def unloaded(app: Any, module: Any, rank: int = 0) -> list[str]:
    """Parameters of a rank's `module` that loading leaves as they were made, and loaded ones that it does not have."""
    from neuronx_distributed.trace.trace import get_sharded_checkpoint

    loaded, own = app.checkpoint_loader_fn(), module.state_dict()
    unexpected = loaded.keys() - own.keys()
    get_sharded_checkpoint(loaded, module, rank, app.neuron_config.tp_degree)  # adds what NxD's modules make themselves
    state = {name for name in own if name.startswith("kv_mgr.past_key_values.")}
    assert len(state) == 2 * app.config.model.num_hidden_layers
    return sorted(
        unexpected
        | {name for name in own.keys() - state if name not in loaded or not torch.equal(own[name], loaded[name])}
    )
