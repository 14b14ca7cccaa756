"""bfloat16 on the lowered graphs: the mean error of the logits is at most 1.1 times Hugging Face's own in bfloat16.

Against the stored float32 results, on weights that were rounded beforehand: a prompt of 100 tokens and 16 decode steps.
A context graph returns the logits of the last token only, so every beginning of the prompt is a prompt. A mixture of
experts is judged with all experts chosen: one flipped expert costs more than all rounding, and a graph does not tell
which ones it chose.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from tests.nxdi.hosted import ONE_BUCKET, Hosted, Requests, lowered
from tests.nxdi.references import BFLOAT16_PROMPT, FAMILY_NAMES, NAMES, Bfloat16, reference

pytestmark = pytest.mark.nxdi
FACTOR = 1.1
OPTIONS = ONE_BUCKET | {"torch_dtype": torch.bfloat16}
KEPT_IN_FLOAT32 = ("A_log.weight", "dt_bias.weight", "linear_attn.norm.weight", "rope.inv_freq", "linear_router.weight")


def hosted(name: str) -> Hosted:
    all_experts = reference(name).all_experts is not None
    return Hosted(lowered(name, rounded=True, all_experts=all_experts, **OPTIONS))


def stored(name: str) -> Bfloat16:
    run = reference(name).all_experts or reference(name).bfloat16
    assert run is not None
    return run


@functools.cache
def prompts_logits(name: str, scaled: str | None) -> Tensor:
    """Logits [116, V] after each of the prompt's beginnings and of the decoded tokens; one weight times 1.05."""
    application = hosted(name)
    if scaled is not None:
        application.values[scaled] = application.values[scaled] * 1.05
    requests = Requests(application)
    ids = stored(name).ids
    logits = [requests.prefill(1, ids[: length + 1]) for length in range(BFLOAT16_PROMPT)]
    logits += [requests.decode({1: int(token)})[0] for token in ids[BFLOAT16_PROMPT:]]
    return torch.stack(logits)


def ratios(name: str, scaled: str | None = None) -> tuple[float, float, float]:
    """Our mean |error| over Hugging Face's: of the prefill, of the decode steps, of all."""
    run = stored(name)
    ours, theirs = (
        (logits - run.exact.logits).abs().double() for logits in (prompts_logits(name, scaled), run.theirs.logits)
    )
    parts = (slice(None, BFLOAT16_PROMPT), slice(BFLOAT16_PROMPT, None), slice(None))
    prefill, decode, both = ((ours[part].mean() / theirs[part].mean()).item() for part in parts)
    means = f"ours {ours.mean():.5f}, theirs {theirs.mean():.5f}"
    print(f"{name}: mean |error| {means}; ratios {prefill:.3f} prefill, {decode:.3f} decode, {both:.3f} both")
    return prefill, decode, both


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_error_is_no_larger_than_hugging_faces(name: str) -> None:
    assert max(ratios(name)) <= FACTOR


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_control_one_weight_times_1_05_fails(name: str) -> None:
    """The criterion notices a single wrong weight."""
    assert min(ratios(name, scaled="layers.1.linear_attn.out_proj.weight")) > FACTOR


@pytest.mark.parametrize("name", NAMES)
def test_what_is_float32_in_the_graphs(name: str) -> None:
    """The recurrent state wherever it goes, and the parameters that are never rounded; all else is bfloat16."""
    from nxdi_qwen.compile import hlo_proto

    more = {"continuation_buckets": (70,), "speculation_length": 4}
    application = Hosted(lowered(name, **OPTIONS | more))
    described = application.description.tensors
    roles = {state: tensor.role for state, tensor in zip(application.state_names, described, strict=True)}
    recurrent = next(tensor.shape for tensor in described if tensor.role == "recurrent")
    for route, graph in application.graphs.items():
        module = hlo_proto.parse_module(graph.proto)
        outputs = hlo_proto.output_shapes(module)
        for parameter, held in zip(graph.parameters, hlo_proto.entry_parameters(module), strict=True):
            dtype = hlo_proto.element_name(held.shape)
            if parameter in roles:
                assert dtype == ("f32" if roles[parameter] == "recurrent" else "bf16"), (route, parameter)
                assert hlo_proto.element_name(outputs[graph.aliases[parameter]]) == dtype, (route, parameter)
            elif not parameter.startswith("input:"):
                assert dtype == ("f32" if parameter.endswith(KEPT_IN_FLOAT32) else "bf16"), (route, parameter)
        for instruction in hlo_proto.entry_computation(module).instructions:
            for shape in hlo_proto.arrays(instruction.shape):
                if tuple(shape.dimensions)[1:] == recurrent[1:]:
                    assert hlo_proto.element_name(shape) in ("f32", "pred"), (route, instruction.name)
