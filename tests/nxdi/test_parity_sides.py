"""The sides of a comparison that need NxDI: its CPU mode, and lowered graphs, beside Hugging Face's stored results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from nxdi_qwen.compile.source import ModelSource
from nxdi_qwen.parity.records import Prompt, Run
from nxdi_qwen.parity.targets.eager import EagerSide
from nxdi_qwen.parity.targets.lowered import LoweredSide
from nxdi_qwen.parity.targets.nxdi import NxdiSide
from nxdi_qwen.scripts.logit_diff import logit_diff
from tests.command_line import call, refused
from tests.comparison import relative
from tests.nxdi.references import FAMILY_NAMES, reference

if TYPE_CHECKING:
    from nxdi_qwen.parity.targets.side import Side

pytestmark = pytest.mark.nxdi
LIMIT = 1e-5
STEPS = 4
Checkpoint = Callable[[str], Path]


def compare(side: Side, source: ModelSource, name: str, length: int) -> Run:
    """Fails unless the logits are Hugging Face's, and everything else the eager model's."""
    stored = reference(name).prompts[length]
    prompt, forced = Prompt(str(length), tuple(stored.ids.tolist())), stored.continuation[:STEPS].tolist()
    eager = EagerSide.of_checkpoint(source, "float32")
    actual, expected = side.run(prompt, forced, STEPS), eager.run(prompt, forced, STEPS)
    assert actual.logits is not None and expected.logits is not None
    assert relative(actual.logits[length - 1 :], stored.logits[: 1 + STEPS]) <= LIMIT
    assert relative(actual.logits, expected.logits) <= LIMIT
    assert actual.states is not None and expected.states is not None and actual.states.keys() == expected.states.keys()
    for state, tensor in expected.states.items():
        assert relative(actual.states[state], tensor) <= LIMIT, state
    if actual.hidden is not None:
        assert expected.hidden is not None and relative(actual.hidden, expected.hidden) <= LIMIT
    if actual.experts is not None:
        assert expected.experts is not None and torch.equal(actual.experts, expected.experts)
        assert actual.router_margins is not None and expected.router_margins is not None
        assert torch.allclose(actual.router_margins, expected.router_margins, atol=LIMIT)
    return actual


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_nxdi_in_its_cpu_mode(checkpoint: Checkpoint, name: str) -> None:
    source = ModelSource.from_checkpoint(checkpoint(name))
    side = NxdiSide(source, "float32")
    side.longest = 140
    for length in (1, 3, 65, 130):  # more than there are slots
        run = compare(side, source, name, length)
        assert run.hidden is not None and (run.experts is not None) == any(source.config.moe_layers)


def test_lowered_graphs(checkpoint: Checkpoint) -> None:
    name = "qwen3_5"
    source = ModelSource.from_checkpoint(checkpoint(name))
    side = LoweredSide(source, "float32")
    side.longest = 70
    for length in (1, 3, 65):
        run = compare(side, source, name, length)
        assert run.hidden is None and run.experts is None


def test_the_command(checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reference comes from elsewhere here: transformers 4.57 is refused as one."""
    base: list[Any] = ["--model", checkpoint("qwen3_5"), "--cache", tmp_path / "cache", "--prompts", "repeated"]
    refused(capsys, logit_diff, tmp_path, [*base, "--target", "nxdi"], "is no valid reference")
    output = call(capsys, logit_diff, *base, "--target", "nxdi", "--reference", "eager", "--json")
    report = json.loads(output.out)  # NxD's log stays out of it
    assert output.status == 0 and report["passed"] and report["prompts"][0]["hidden_rel"]
