"""Planted faults: the layer and the cause. `python -m tests.parity.measure_causes` plants all of them, often."""

from __future__ import annotations

import pytest
import torch

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.parity.alone import away_from_ties, beyond, compare_parts
from nxdi_qwen.parity.causes import ROUTER_FLIP, UNKNOWN
from nxdi_qwen.parity.eager_layer import run_eager_layer
from nxdi_qwen.parity.huggingface_layer import run_huggingface_layer
from nxdi_qwen.parity.layer_run import layer_cases
from nxdi_qwen.parity.mistakes import MISTAKES
from nxdi_qwen.parity.plain_layer import PlainLayer
from nxdi_qwen.parity.plain_weights import layer_weights
from tests.fault_situations import alone
from tests.faults import FAULTS, MLP_LAYER, Edit, Fault
from tests.hf_fixtures import hf_model
from tests.parity.measure_causes import EXPECTED, OUTSIDE, SPARSE, plant_and_look
from tests.parity.planting import broken_package
from tests.support import eager

BY_NAME = {fault.name: fault for fault in FAULTS}
# One of every cause; of those outside the list one in every kind of layer.
QUICK = ("decay mask", "gate split", "expert blocks")
SLOW = ("conv tail", "grouped projections", "+1 norm", "state dtype", "mrope sections", "fresh slot")


def check(name: str, seed: int) -> None:
    fault, (kind, cause) = BY_NAME[name], EXPECTED[name]
    finding = plant_and_look(fault, broken_package(fault), kind, cause, seed, times=1)
    assert finding.right_layer and finding.right_cause, finding


@pytest.mark.parametrize("name", QUICK)
def test_layer_and_cause(name: str) -> None:
    check(name, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_layer_and_cause_of_more_faults(name: str) -> None:
    check(name, seed=4)


def test_the_first_position() -> None:
    """The outputs of every chunk but the first are wrong: from token 64 on."""
    fault, (kind, cause) = BY_NAME["chunk boundary: restart"], EXPECTED["chunk boundary: restart"]
    finding = plant_and_look(fault, broken_package(fault), kind, cause, seed=7, times=1)
    assert finding.right_layer and finding.right_cause and finding.position == 64, finding


@pytest.mark.parametrize(("kind", "fault"), OUTSIDE[1:4:2], ids=lambda value: getattr(value, "name", None))
def test_outside_the_list_no_cause_is_named(kind: str, fault: Fault) -> None:
    finding = plant_and_look(fault, broken_package(fault), kind, UNKNOWN, seed=5, times=1)
    assert finding.right_layer and finding.right_cause, finding
    assert finding.first_parting is not None


def test_a_router_that_chooses_other_experts() -> None:
    edit = Edit(
        MLP_LAYER,
        "functional.linear(x, self.weight), self.top_k",
        "functional.linear(x, self.weight.roll(1, 0)), self.top_k",
    )
    fault = Fault("router", "", (edit,), "qwen3_5_moe", alone, ())
    finding = plant_and_look(fault, broken_package(fault), SPARSE, ROUTER_FLIP, seed=6, times=1)
    assert finding.right_layer and finding.right_cause, finding


def test_every_fault_has_an_expected_cause() -> None:
    assert EXPECTED.keys() == BY_NAME.keys()


@pytest.mark.parametrize("fixture", ["qwen3_next_mixed", "qwen3_5_bias"])
def test_the_plain_layer_is_hugging_faces_and_so_is_ours(fixture: str) -> None:
    model, own = hf_model(fixture), eager(fixture).model
    config: ModelConfig = own.config
    x = torch.randn(171, config.hidden_size, generator=torch.Generator().manual_seed(1))
    cases = layer_cases(x, config.rope.mrope_section is not None)
    for index in range(config.num_hidden_layers):
        plain = PlainLayer(config, index, layer_weights(model.model.layers[index], config.linear_num_key_heads))
        truth = [plain.run(case) for case in cases]
        counts = [away_from_ties(run, config, "float32") for run in truth]
        theirs = [run_huggingface_layer(model, index, case) for case in cases]
        rounding = [compare_parts(*three) for three in zip(theirs, truth, counts, strict=True)]
        assert max(part.error for parts in rounding for part in parts) < 2e-6
        ours = [run_eager_layer(own, index, case) for case in cases]
        assert not beyond(cases, ours, truth, rounding, counts, "float32")
        for run, expected in zip(ours, truth, strict=True):
            for mine, other in zip(run.requests, expected.requests, strict=True):
                for name in mine.intermediates:
                    torch.testing.assert_close(
                        mine.intermediates[name].double(), other.intermediates[name], rtol=1e-4, atol=1e-4
                    )


@pytest.mark.slow
def test_every_mistake_shows_and_no_two_of_different_causes_are_alike() -> None:
    fixture = "qwen3_5_moe"
    model = hf_model(fixture)
    config = eager(fixture).model.config
    x = torch.randn(171, config.hidden_size, generator=torch.Generator().manual_seed(2))
    cases = layer_cases(x, config.rope.mrope_section is not None)
    for index in (2, 3):  # GDN, attention
        weights = layer_weights(model.model.layers[index], config.linear_num_key_heads)
        right = PlainLayer(config, index, weights)
        possible = [mistake for mistake in MISTAKES if mistake.possible(right)]
        results = {
            mistake: torch.cat(
                [
                    request.output.flatten()
                    for case in cases
                    for request in mistake(config, index, weights).run(case).requests
                ]
            )
            for mistake in possible
        }
        truth = torch.cat([request.output.flatten() for case in cases for request in right.run(case).requests])
        for first, mine in results.items():
            assert not (mine - truth).abs().max() < 1e-4, first
            for second, other in results.items():
                if first.cause != second.cause:
                    assert not (mine - other).abs().max() < 1e-4, (first, second)
