"""The drill-down on whole models: which part is at fault, and what stands first in a report."""

from __future__ import annotations

import functools
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nxdi_qwen.compile.source import ModelSource
from nxdi_qwen.parity.causes import UNKNOWN
from nxdi_qwen.parity.compare import compare_runs, comparison
from nxdi_qwen.parity.layer_run import LayerCase
from nxdi_qwen.parity.mistakes.base import NORM
from nxdi_qwen.parity.records import Prompt
from nxdi_qwen.parity.result import Drill
from nxdi_qwen.parity.targets.eager import EagerSide
from nxdi_qwen.parity.targets.huggingface import HuggingFaceSide
from tests.hf_fixtures import hf_model, save_checkpoint
from tests.parity.measure_causes import look


@functools.cache
def checkpoint(fixture: str) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory()
    save_checkpoint(hf_model(fixture), Path(folder.name))
    return folder


def source_of(fixture: str) -> ModelSource:
    return ModelSource.from_checkpoint(Path(checkpoint(fixture).name))


@functools.cache
def reference(fixture: str, dtype: str = "float32") -> HuggingFaceSide:
    return HuggingFaceSide(source_of(fixture), dtype)


def target(fixture: str, dtype: str = "float32") -> EagerSide:
    return EagerSide.of_checkpoint(source_of(fixture), dtype)


def drilled(own: EagerSide, fixture: str) -> Drill:
    return look(reference(fixture), own, None, seed=0)


@pytest.mark.parametrize(("fixture", "dtype"), [("qwen3_5_wide", "float32"), ("qwen3_next_mixed", "bfloat16")])
def test_an_unbroken_model_has_no_fault(fixture: str, dtype: str) -> None:
    sixteen_bit = reference(fixture, dtype) if dtype == "bfloat16" else None
    outcome = look(reference(fixture), target(fixture, dtype), sixteen_bit, seed=1)
    assert outcome.place is None and outcome.cause is None, outcome


def _embedding(own: EagerSide) -> None:
    own.model.embed_tokens.weight[40:80] *= 1.01


def _final_norm(own: EagerSide) -> None:
    own.model.norm.weight -= 1.0


def _head(own: EagerSide) -> None:
    own.model.lm_head.weight[17] *= 1.05  # type: ignore[index,operator]


@pytest.mark.parametrize(
    ("breaks", "name", "cause"),
    [(_embedding, "embedding", UNKNOWN), (_final_norm, "final norm", NORM), (_head, "head", UNKNOWN)],
)
def test_what_stands_outside_the_layers(breaks: Callable[[EagerSide], None], name: str, cause: str) -> None:
    own = target("qwen3_5")
    with torch.no_grad():
        breaks(own)
    outcome = drilled(own, "qwen3_5")
    assert outcome.place is not None and outcome.cause is not None
    assert (outcome.place.name, outcome.cause.name) == (name, cause)


def test_a_wrong_weight_is_found_in_its_layer_without_a_guess_at_the_cause() -> None:
    own = target("qwen3_5")
    with torch.no_grad():
        own.model.layers[2].mlp.down_proj.weight[:, 5] *= 2.0  # type: ignore[union-attr,index]
    outcome = drilled(own, "qwen3_5")
    assert outcome.place is not None and outcome.cause is not None
    assert (outcome.place.name, outcome.place.layer, outcome.place.tensor) == ("layer 2", 2, "output")
    assert outcome.place.position == 0
    assert (outcome.cause.name, outcome.cause.first_parting) == (UNKNOWN, "output")


def test_a_target_without_layers_is_judged_by_its_run() -> None:
    class Closed(EagerSide):
        def run_layer(self, index: int, case: LayerCase) -> None:  # type: ignore[override]
            return None

    source = source_of("qwen3_5")
    own = Closed.of_checkpoint(source, "float32")
    with torch.no_grad():
        own.model.layers[1].linear_attn.k_proj.weight[3] *= 2.0  # type: ignore[union-attr,index]
    outcome = drilled(own, "qwen3_5")
    assert outcome.place is not None and outcome.place.name == "layer 1"
    assert outcome.place.tensor in ("recurrent", "conv", "output")
    assert any("cannot run a layer alone" in note for note in outcome.notes)
    right = drilled(Closed.of_checkpoint(source, "float32"), "qwen3_5")
    assert right.place is None


def test_nan_is_the_first_line() -> None:
    own = target("qwen3_5")
    with torch.no_grad():
        own.model.layers[2].mlp.down_proj.weight[0, 0] = math.nan  # type: ignore[union-attr,index]
    expected = reference("qwen3_5").run(Prompt("three tokens", (5, 6, 7)), None, 2)
    actual = own.run(expected.prompt, expected.forced, 0)
    config = reference("qwen3_5").config
    result = compare_runs(expected, actual, None, config, "float32")
    outcome = comparison(reference("qwen3_5"), own, None, [result], drilled(own, "qwen3_5"))
    assert outcome.lines[0].startswith(
        "three tokens: NaN in the target's hidden states, layer 2, prefill, position 0 ("
    )
    assert outcome.lines[1] == "FAILED: 1 of 1 prompts"
    assert any(line.startswith("parts in layer 2, position 0") for line in outcome.lines)
    assert not outcome.passed
    assert '"value": "NaN"' in json.dumps(outcome.to_dict(), allow_nan=False)


def test_routing_flips_at_near_ties_are_no_fault_of_the_layer_behind() -> None:
    fixture = "qwen3_5_moe"
    sides = (reference(fixture), reference(fixture, "bfloat16"), target(fixture, "bfloat16"))
    ids = torch.randint(0, 272, (130,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = sides[0].run(Prompt("130 tokens", tuple(ids)), None, 8)
    sixteen_bit, actual = (side.run(expected.prompt, expected.forced, 0) for side in sides[1:])
    result = compare_runs(expected, actual, sixteen_bit, sides[0].config, "bfloat16")
    assert result.passed and result.routing_flips and not all(result.judged)
    assert all(flip.near_tie for flip in result.routing_flips), result.routing_flips
    outcome = look(sides[0], sides[2], sides[1], seed=0)
    assert outcome.place is None


def test_bfloat16_passes_three_way_and_fails_a_tight_two_way() -> None:
    fixture = "qwen3_5"
    sides = (reference(fixture), reference(fixture, "bfloat16"), target(fixture, "bfloat16"))
    ids = torch.randint(0, 272, (70,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = sides[0].run(Prompt("70 tokens", tuple(ids)), None, 16)
    sixteen_bit, actual = (side.run(expected.prompt, expected.forced, 0) for side in sides[1:])
    result = compare_runs(expected, actual, sixteen_bit, sides[0].config, "bfloat16", {None: 1e-4})
    assert result.passed and result.three_way_passed and not result.two_way_passed
    outcome = comparison(sides[0], sides[2], sides[1], [result], None)
    assert outcome.passed
    assert any("two-way, prefill" in line and "tolerance 1e-04" in line for line in outcome.lines)
    assert any("no more than the rounding of bfloat16" in line for line in outcome.lines)
