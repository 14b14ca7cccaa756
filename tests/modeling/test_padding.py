"""What stands in padding, idle rows, freed slots and beyond a row's length changes no bit of a real row.

Validity comes from the mask alone: no id acts as padding or as an end.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.comparison import bits
from tests.hf_fixtures import FIXTURES, IM_END_ID, PAD_ID, hf_model, reference_logits
from tests.scenarios import LAYOUTS
from tests.support import Engine, Forward, Prefilled, assert_close, eager, exported, tokens_of

UNUSED_ID = 271  # in no prompt of this file; the last one, so that a tied head's column of it is easy to leave out
POISONS = (math.nan, math.inf)
FORWARDS = [pytest.param(eager, name, id=f"eager-{name}") for name in FIXTURES] + [
    pytest.param(exported, name, id=f"exported-{name}", marks=pytest.mark.slow)
    for name in ("qwen3_next_mixed", "qwen3_5", "qwen3_5_moe")
]


class Traffic:
    """Every situation in one short history; `outputs` collects all that belongs to requests.

    `padding` is the embedding of every padded position, `slots` what the state holds before and after a request,
    `beyond` what keys and values hold beyond a request's length.
    """

    def __init__(
        self, forward: Forward, name: str, layout: str, padding: float = 0.0, slots: float = 0.0, beyond: float = 0.0
    ) -> None:
        embedding = forward.weights["embed_tokens.weight"].clone()
        embedding[UNUSED_ID] = padding
        self.engine = Engine(forward.with_weights({"embed_tokens.weight": embedding}), UNUSED_ID, slots)
        self.prompts = [torch.where(tokens_of(name, n) == UNUSED_ID, 7, tokens_of(name, n)) for n in range(5)]
        self.layout, self.slots, self.beyond = layout, slots, beyond
        self.outputs: list[Tensor] = []
        self._run()

    def _run(self) -> None:
        first, second, third, fourth, fifth = self.prompts
        self._prefill({3: first[:5], 0: second[:63], 4: third[:65], 1: first[:0]})
        self._decode({3: int(first[5]), 0: int(second[63]), 4: int(third[65])})
        self._decode({4: int(third[66]), 3: int(first[6])})
        self._free(0)
        # A new request, one that goes on, and one that waits beside them.
        self._prefill({0: fourth[:3], 3: first[7:23], 4: third[:0]})
        self._free(4)
        self._decode({4: int(fifth[0]), 0: int(fourth[3]), 3: int(first[23])})  # slot 4 starts by a decode step
        self._decode({4: int(fifth[1]), 0: int(fourth[4])})
        for slot in (0, 3, 4):
            self.outputs.extend(self.engine.live_state(slot))

    def _prefill(self, requests: dict[int, Tensor]) -> None:
        results: dict[int, Prefilled] = self.engine.prefill(requests, self.layout, bucket=80)
        self._collect([logits for result in results.values() for logits in result])

    def _decode(self, tokens: dict[int, int]) -> None:
        self._collect(list(self.engine.decode(tokens).values()))

    def _collect(self, logits: list[Tensor]) -> None:
        self.outputs.extend(x[..., :UNUSED_ID] for x in logits)
        for described, tensor in zip(self.engine.forward.description.tensors, self.engine.state, strict=True):
            if described.role in ("key", "value"):
                for slot, length in enumerate(self.engine.lengths):
                    if length:
                        tensor[slot, :, length:] = self.beyond

    def _free(self, slot: int) -> None:
        self.engine.lengths[slot] = 0
        for tensor in self.engine.state:
            tensor[slot] = self.slots


@pytest.mark.parametrize("where", ["padding", "slots", "beyond"])
@pytest.mark.parametrize(("make", "name"), FORWARDS)
def test_poison_reaches_no_bit(make, name: str, where: str) -> None:
    forward = make(name)
    for layout in LAYOUTS if where == "padding" else LAYOUTS[:1]:
        clean = Traffic(forward, name, layout).outputs
        for poison in POISONS:
            outputs = Traffic(forward, name, layout, **{where: poison}).outputs
            for number, (actual, expected) in enumerate(zip(outputs, clean, strict=True)):
                assert expected.isfinite().all()
                assert torch.equal(bits(actual), bits(expected)), f"{layout}: {poison} reached output {number}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("make", "name"), FORWARDS)
def test_pad_and_end_ids_are_ordinary_tokens(make, name: str, layout: str) -> None:
    """They stand first, in the middle and last in the prompt, and in the padding as well."""
    ids = torch.tensor([PAD_ID, PAD_ID, 10, IM_END_ID, PAD_ID, 20, *tokens_of(name, 0)[:60], IM_END_ID, PAD_ID, PAD_ID])
    engine = Engine(make(name), pad_id=PAD_ID)
    result = engine.prefill({1: ids, 4: ids[4:], 0: ids[:1]}, layout, bucket=90)
    model = hf_model(name)
    for slot, prompt in {1: ids, 4: ids[4:], 0: ids[:1]}.items():
        expected = reference_logits(model, prompt)
        assert_close(result[slot].every, expected, slot)
        assert_close(result[slot].last, expected[-1], slot)
    step = engine.decode({1: PAD_ID, 0: IM_END_ID})
    assert_close(step[1], reference_logits(model, torch.cat([ids, torch.tensor([PAD_ID])]))[-1], "decode")
    assert_close(step[0], reference_logits(model, torch.tensor([PAD_ID, IM_END_ID]))[-1], "decode")
