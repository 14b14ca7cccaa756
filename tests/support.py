"""What the parity tests share: our model from a fixture's checkpoint, and an engine that serves requests in slots.

A `Forward` is the eager model or a set of exported programs behind the same two calls; `Engine` turns requests (a slot
and token ids) into batches for it and keeps the state, so that every check runs on both. References are Hugging Face's,
one unpadded row at a time; they are cached for the session.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nxdi_qwen.compile.graph_model import GraphModel
from nxdi_qwen.compile.graphs import CONTEXT, CONTINUATION, DECODE, HEAD, GraphSpec, capture, pass_specs
from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.config_loader import load_config
from nxdi_qwen.modeling.model import Batch, HybridCausalLM, State, text_positions
from nxdi_qwen.modeling.state import StateDescription, describe_state
from nxdi_qwen.modeling.weights import Checkpoint, plan_weights, stream_weights
from tests.comparison import bits, relative
from tests.hf_fixtures import hf_model, prompt_ids, reference_logits, reference_steps, save_checkpoint

TOLERANCE = 1e-5
SLOTS, MAX_LENGTH = 5, 340
GRAPH_ROWS, GRAPH_TOKENS = 4, 128
DECODE_STEPS = 24


class Loaded(NamedTuple):
    """A checkpoint as our loader reads it."""

    config: ModelConfig
    weights: dict[str, Tensor]


def load(model: PreTrainedModel, dtype: torch.dtype = torch.float32, **form: Any) -> Loaded:
    """`model` saved by Hugging Face (`form`: see `save_checkpoint`) and read back by us."""
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(model, Path(folder), **form)
        settings = load_config(Path(folder))
        checkpoint = Checkpoint.open(folder)
        plan = plan_weights(settings.config, checkpoint, settings.quantization)
        return Loaded(plan.config, dict(stream_weights(plan, checkpoint, dtype)))


@functools.cache
def loaded_fixture(name: str) -> Loaded:
    return load(hf_model(name))


class Forward(Protocol):
    """`rows` and `tokens`: the static shape of the context graph, None where any shape is taken."""

    rows: int | None
    tokens: int | None
    weights: dict[str, Tensor]
    description: StateDescription

    def prefill(self, batch: Batch, state: State) -> tuple[Tensor, Tensor, State]:
        """Last logits [B, V], logits [B, T, V] of every token, new state."""

    def decode(self, batch: Batch, state: State) -> tuple[Tensor, State]:
        """Logits [B, V], new state."""

    def with_weights(self, changes: Mapping[str, Tensor]) -> Forward:
        """The same computation with some parameters replaced."""


class EagerForward:
    rows = tokens = None

    def __init__(self, loaded: Loaded, dtype: torch.dtype = torch.float32) -> None:
        self.config, self.weights = loaded
        self.dtype = dtype
        self.model = HybridCausalLM(self.config, dtype)
        self.model.load_state_dict(self.weights, strict=True, assign=True)
        self.model.requires_grad_(False)
        self.description = describe_state(self.config, SLOTS, MAX_LENGTH, dtype)

    def prefill(self, batch: Batch, state: State) -> tuple[Tensor, Tensor, State]:
        out = self.model.prefill(batch, state)
        return out.logits, self.model.head(out.hidden), out.state

    def decode(self, batch: Batch, state: State) -> tuple[Tensor, State]:
        return self.model.decode(batch, state)

    def with_weights(self, changes: Mapping[str, Tensor]) -> EagerForward:
        return EagerForward(Loaded(self.config, self.weights | dict(changes)), self.dtype)


class ExportedForward:
    """Captured programs: context encoding, token generation over all slots, and the head for every token's logits."""

    rows, tokens = GRAPH_ROWS, GRAPH_TOKENS

    def __init__(self, loaded: Loaded, calls: dict[str, torch.nn.Module] | None = None) -> None:
        self.config, self.weights = loaded
        self.description = describe_state(self.config, SLOTS, MAX_LENGTH, torch.float32)
        specs = [
            *pass_specs(self.config, CONTEXT, GRAPH_ROWS, GRAPH_TOKENS),
            *pass_specs(self.config, CONTINUATION, GRAPH_ROWS, GRAPH_TOKENS),
            *pass_specs(self.config, DECODE, SLOTS, 1),
            GraphSpec(HEAD, GRAPH_ROWS * GRAPH_TOKENS, 1),
        ]
        self.calls = calls or {
            spec.name: capture(spec, self.config, torch.float32, self.description).module() for spec in specs
        }
        self.model = GraphModel(self.config, self.calls, self.weights)

    def prefill(self, batch: Batch, state: State) -> tuple[Tensor, Tensor, State]:
        logits, hidden, state = self.model.context(batch, state)
        return logits, self.model.head(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2]), state

    def decode(self, batch: Batch, state: State) -> tuple[Tensor, State]:
        assert batch.slots is None
        return self.model.decode(batch, state)

    def with_weights(self, changes: Mapping[str, Tensor]) -> ExportedForward:
        return ExportedForward(Loaded(self.config, self.weights | dict(changes)), self.calls)


@functools.cache
def eager(name: str) -> EagerForward:
    return EagerForward(loaded_fixture(name))


@functools.cache
def exported(name: str) -> ExportedForward:
    return ExportedForward(loaded_fixture(name))


class Prefilled(NamedTuple):
    """`last` [V] as the graph returns it; `every` [T, V], one for each token of the request."""

    last: Tensor
    every: Tensor


class Engine:
    """Serves requests: `lengths[slot]` tokens stand in each slot; the state starts as NaN, nothing may rely on zeros.

    After every call the slots that had no part in it are compared, bit by bit, with what they held before.
    """

    def __init__(self, forward: Forward, pad_id: int | None = None, fill: float = torch.nan) -> None:
        """`pad_id` stands in the padding (None: arbitrary ids), `fill` in the state."""
        self.forward = forward
        self.pad_id = pad_id
        self.state = [tensor.fill_(fill) for tensor in forward.description.allocate()]
        self.lengths = [0] * SLOTS
        self.generator = torch.Generator().manual_seed(5)

    def prefill(
        self, requests: Mapping[int, Tensor], layout: str = "right", bucket: int | None = None
    ) -> dict[int, Prefilled]:
        """Row i is the i-th of `requests` (slot -> token ids [T], none for an idle row), behind what its slot holds.

        The tokens beyond a bucket follow in further pieces.
        """
        bucket = self.forward.tokens or bucket or max(len(ids) for ids in requests.values())
        pieces: dict[int, list[Prefilled]] = {slot: [] for slot in requests}
        for begin in range(0, max(len(ids) for ids in requests.values()), bucket):
            part = {slot: ids[begin : begin + bucket] for slot, ids in requests.items()}
            for slot, result in self._prefill_bucket(part, layout, bucket).items():
                pieces[slot].append(result)
        return {slot: Prefilled(own[-1].last, torch.cat([p.every for p in own])) for slot, own in pieces.items() if own}

    def _prefill_bucket(self, requests: Mapping[int, Tensor], layout: str, bucket: int) -> dict[int, Prefilled]:
        rows = self.forward.rows or len(requests)
        ids = self._padding((rows, bucket))
        valid = torch.zeros(rows, bucket, dtype=torch.bool)
        # A row without a request names a slot as well, one in use by another row.
        slots = torch.full((rows,), next(iter(requests)))
        for row, (slot, tokens) in enumerate(requests.items()):
            places = self._places(len(tokens), layout, bucket)
            ids[row, places], valid[row, places], slots[row] = tokens, True, slot
        start = torch.tensor([self.lengths[slot] for slot in slots])
        positions = torch.where(valid, text_positions(start, valid), 10**6)
        last, every, state = self.forward.prefill(Batch(ids, valid, positions, start, slots), self.state)
        active = [slot for slot, tokens in requests.items() if len(tokens)]
        self._accept(state, {slot: len(requests[slot]) for slot in active})
        rows_of = {slot: row for row, slot in enumerate(requests)}
        return {slot: Prefilled(last[rows_of[slot]], every[rows_of[slot], valid[rows_of[slot]]]) for slot in active}

    def decode(self, tokens: Mapping[int, int], row_is_slot: bool = True) -> dict[int, Tensor]:
        """One token (slot -> id) for some requests -> their logits [V]. Without `row_is_slot` rows name their slots."""
        rows = list(range(SLOTS)) if row_is_slot else list(tokens)
        ids = self._padding((len(rows), 1))
        valid = torch.tensor([[slot in tokens] for slot in rows])
        for slot, token in tokens.items():
            ids[rows.index(slot)] = token
        start = torch.tensor([self.lengths[slot] for slot in rows])
        slots = None if row_is_slot else torch.tensor(rows)
        logits, state = self.forward.decode(Batch(ids, valid, text_positions(start, valid), start, slots), self.state)
        self._accept(state, dict.fromkeys(tokens, 1))
        return {slot: logits[rows.index(slot)] for slot in tokens}

    def _padding(self, shape: tuple[int, int]) -> Tensor:
        if self.pad_id is not None:
            return torch.full(shape, self.pad_id)
        return torch.randint(0, 272, shape, generator=self.generator)

    def _places(self, count: int, layout: str, bucket: int) -> Tensor:
        if layout == "interior":
            return torch.randperm(bucket, generator=self.generator)[:count].sort().values
        first = {"right": 0, "left": bucket - count}[layout]
        return torch.arange(first, first + count)

    def _accept(self, state: State, added: Mapping[int, int]) -> None:
        idle = [slot for slot in range(SLOTS) if slot not in added]
        for described, old, new in zip(self.forward.description.tensors, self.state, state, strict=True):
            assert (new.shape, new.dtype) == (described.shape, described.dtype)
            assert torch.equal(bits(new[idle]), bits(old[idle])), f"{described.name} of an idle slot changed"
        self.state = state
        for slot, count in added.items():
            self.lengths[slot] += count

    def live_state(self, slot: int) -> list[Tensor]:
        """What `slot` holds of its request: keys and values up to its length, recurrent and conv whole."""
        described = zip(self.forward.description.tensors, self.state, strict=True)
        return [
            tensor[slot, :, : self.lengths[slot]] if d.role in ("key", "value") else tensor[slot]
            for d, tensor in described
        ]


@functools.cache
def tokens_of(name: str, seed: int) -> Tensor:
    """The token ids [340] of which prompt `seed` of a fixture is the beginning."""
    return prompt_ids(hf_model(name), MAX_LENGTH, seed)


@functools.cache
def reference_prefill(name: str, seed: int, length: int) -> Tensor:
    """Logits [length, V] of every token of a prompt."""
    return reference_logits(hf_model(name), tokens_of(name, seed)[:length])


@functools.cache
def reference_decode(name: str, seed: int, length: int) -> Tensor:
    """Logits [1 + 24, V] after a prompt and after each of the 24 tokens that follow it, fed one by one."""
    ids = tokens_of(name, seed)
    return reference_steps(hf_model(name), ids[:length], ids[length : length + DECODE_STEPS]).logits


def assert_close(actual: Tensor, expected: Tensor, what: object) -> None:
    assert actual.shape == expected.shape, what
    rel = relative(actual, expected)
    assert rel <= TOLERANCE, f"{what}: rel {rel:.2e}"
