"""Greedy sampling on the device: the token that a graph returns is the largest of the logits that it would return."""

from __future__ import annotations

import pytest
import torch

from tests.nxdi.hosted import ONE_BUCKET, Hosted, lowered
from tests.nxdi.references import FAMILY_NAMES, reference

pytestmark = pytest.mark.nxdi
OPTIONS = ONE_BUCKET | {"speculation_length": 4}


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_greedy_token_is_the_largest_logit(name: str) -> None:
    from neuronx_distributed_inference.models.config import OnDeviceSamplingConfig

    sampling = {"on_device_sampling_config": OnDeviceSamplingConfig(), "disable_argmax_kernel": True}
    sampled, plain = (
        Hosted(lowered(name, **OPTIONS | sampling)),
        Hosted(lowered(name, **OPTIONS)),
    )
    slots, lengths = (2, 0, 3), (3, 65, 130)
    prompts = [reference(name).prompts[length] for length in lengths]
    rows = [prompt.continuation.tolist() for prompt in prompts]
    calls: list[tuple[list[list[int]], tuple[int, ...], tuple[int, ...]]] = [
        ([prompt.ids.tolist()], (0,), (slot,)) for prompt, slot in zip(prompts, slots, strict=True)
    ]
    calls += [([[row[n]] for row in rows], tuple(length + n for length in lengths), slots) for n in range(8)]
    calls += [([row[8:12] for row in rows], tuple(length + 8 for length in lengths), slots)]
    seen = set()
    for tokens, starts, own_slots in calls:
        logits = plain.forward(tokens, starts, own_slots)
        actual = sampled.forward(tokens, starts, own_slots)
        assert actual.dtype in (torch.int32, torch.int64)
        assert torch.equal(actual.reshape(logits.shape[:2]).long(), logits.argmax(dim=-1)), (starts, own_slots)
        seen |= set(actual.flatten().tolist())
    assert len(seen) > 10
