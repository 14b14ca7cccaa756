"""Applications that run on their lowered graphs: everything outside the graphs is NxDI's own code, as on a device.

Importable without NxDI; what needs it is imported where an application is made.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxdi_qwen.parity.targets.nxdi_application import HostedGraphs, LoweredApplication
from tests.comparison import bits, relative
from tests.nxdi.references import write_checkpoint

CONTEXT, DECODE = "context_encoding_model", "token_generation_model"
CONTINUATION, VERIFY = "continuation_model", "speculation_model"
TOLERANCE = 1e-5
SLOTS, LONGEST = 4, 146
# Context buckets of less than a kernel, less than a chunk, one chunk, and no multiple of one. NxDI takes the first
# bucket that is longer than the prompt, and only the last one may be filled: the references need every bucket here.
BUCKETS: dict[str, Any] = {
    "batch_size": SLOTS,
    "ctx_batch_size": 1,
    "is_continuous_batching": True,
    "seq_len": LONGEST,
    "max_context_length": 130,
    "context_encoding_buckets": (2, 4, 64, 130),
    "token_generation_buckets": (8, 72, LONGEST),
}
# For tests of other things than buckets, which cost a compilation each.
ONE_BUCKET = BUCKETS | {"context_encoding_buckets": (130,), "token_generation_buckets": (LONGEST,)}
# Added to either; the largest context bucket ends within a block.
BLOCKS: dict[str, Any] = {
    "is_block_kv_layout": True,
    "pa_block_size": 16,
    "pa_num_blocks": 25,
    "seq_len": 160,
    "token_generation_buckets": (160,),
}


def lowered(name: str, *, rounded: bool = False, all_experts: bool = False, **options: Any) -> LoweredApplication:
    """The graphs of a fixture (`write_checkpoint` has its forms), lowered once per process.

    `options` are those of HybridNeuronConfig, with tuples for lists.
    """
    return _lowered(name, rounded, all_experts, tuple(sorted(options.items(), key=lambda item: item[0])))


@functools.cache
def _lowered(name: str, rounded: bool, all_experts: bool, options: tuple[tuple[str, Any], ...]) -> LoweredApplication:
    lists = {key: list(value) if isinstance(value, tuple) else value for key, value in options}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(name, Path(folder), rounded=rounded, all_experts=all_experts)
        return LoweredApplication(Path(folder), **lists)


class Hosted(HostedGraphs):
    """Graphs in the place of the compiled model, for slots; see `HostedGraphs`."""

    def forward(
        self,
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        slots: Sequence[int],
        lengths: Sequence[int] | None = None,
        **more: Tensor,
    ) -> Tensor:
        """As the base class; fails if a bit of a slot that is not named has changed."""
        before = self.slot_states()
        result = super().forward(tokens, starts, slots, lengths, **more)
        idle = [slot for slot in range(SLOTS) if slot not in slots]
        for name, state in self.slot_states().items():
            assert torch.equal(bits(state[idle]), bits(before[name][idle])), f"{name} of an idle slot changed"
        return result

    def block_states(self) -> dict[str, Tensor]:
        """The states whose dimension 0 is the block."""
        slots = self.slot_states()
        return {name: self.values[name] for name in self.state_names if name not in slots}

    def slot_states(self) -> dict[str, Tensor]:
        """The states whose dimension 0 is the slot: all of them, unless keys and values are in blocks."""
        blocks = self.application.neuron_config.is_block_kv_layout
        return {
            name: self.values[name]
            for name, tensor in zip(self.state_names, self.description.tensors, strict=True)
            if not (blocks and tensor.role in ("key", "value"))
        }


class Requests:
    """Requests that are served in slots: `lengths[slot]` tokens stand in each."""

    def __init__(self, hosted: Hosted) -> None:
        self.hosted = hosted
        self.lengths = dict.fromkeys(range(SLOTS), 0)

    def prefill(self, slot: int, ids: Tensor) -> Tensor:
        """A prompt [T] from the beginning -> logits [V] after it."""
        self.lengths[slot] = 0
        return self.go_on(slot, ids)

    def go_on(self, slot: int, ids: Tensor) -> Tensor:
        """Tokens [T] behind those in a slot -> logits [V] after them."""
        logits = self.hosted.forward([ids.tolist()], [self.lengths[slot]], [slot])
        self.lengths[slot] += len(ids)
        return logits[0, -1]

    def decode(self, tokens: Mapping[int, int]) -> Tensor:
        """One token a slot, rows in this order -> logits [B, V]."""
        starts = [self.lengths[slot] for slot in tokens]
        logits = self.hosted.forward([[token] for token in tokens.values()], starts, list(tokens))
        for slot in tokens:
            self.lengths[slot] += 1
        return logits[:, -1]


def assert_close(actual: Tensor, expected: Tensor, what: object) -> None:
    error = relative(actual, expected)
    assert error <= TOLERANCE, f"{what}: rel {error:.2e}"
