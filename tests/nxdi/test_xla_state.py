"""The state of the lowered graphs: an input and aliased output of each, and nothing of a slot's past in a prefill."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.comparison import bits
from tests.nxdi.hosted import BLOCKS, CONTEXT, CONTINUATION, DECODE, ONE_BUCKET, VERIFY, Hosted, Requests, lowered
from tests.nxdi.references import DECODE_STEPS, FAMILY_NAMES, NAMES, reference

pytestmark = pytest.mark.nxdi
ALL_GRAPHS = ONE_BUCKET | {"continuation_buckets": (70,), "speculation_length": 4}


@pytest.mark.parametrize("layout", ["slots", "blocks"])
@pytest.mark.parametrize("name", NAMES)
def test_the_alias_table_covers_every_state_of_every_graph(name: str, layout: str) -> None:
    from nxdi_qwen.compile import hlo_proto
    from nxdi_qwen.compile.hlo_report import report

    hosted = Hosted(lowered(name, **ALL_GRAPHS | (BLOCKS if layout == "blocks" else {})))
    described = hosted.description.tensors
    assert {tag for tag, _ in hosted.graphs} == {CONTEXT, CONTINUATION, DECODE, VERIFY}
    assert len(described) == 2 * hosted.application.config.num_hidden_layers == len(hosted.state_names)
    for route, graph in hosted.graphs.items():
        module = hlo_proto.parse_module(graph.proto)
        parameters, outputs = hlo_proto.entry_parameters(module), hlo_proto.output_shapes(module)
        table = {graph.parameters[number]: index for number, index in hlo_proto.alias_table(module).items()}
        # NxDI's order: the logits, then the states.
        assert table == {name: 1 + number for number, name in enumerate(hosted.state_names)}, route
        assert not set(graph.missing) & set(hosted.state_names), route
        for state, tensor in zip(hosted.state_names, described, strict=True):
            dtype = {torch.float32: "f32"}[tensor.dtype]
            shape = f"{dtype}[{','.join(str(size) for size in tensor.shape)}]"
            assert hlo_proto.shape_text(parameters[graph.parameters.index(state)].shape) == shape
            assert hlo_proto.shape_text(outputs[table[state]]) == shape
        assert report(graph).state_faults == (), route
        assert graph.mutated == graph.fallbacks == () and graph.constants == {}, route


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_nan_in_a_slot_does_not_survive_a_prefill(name: str) -> None:
    """What comes after a prefill has the same bits whether the slot held NaN or zeros; so has what it holds then."""
    prompt = reference(name).prompts[65]
    results = []
    for fill in (0.0, torch.nan):
        hosted = Hosted(lowered(name, **ONE_BUCKET), fill)
        requests = Requests(hosted)
        logits = [requests.prefill(2, prompt.ids)]
        held = []
        for state, tensor in zip(hosted.state_names, hosted.description.tensors, strict=True):
            rows = hosted.values[state][2]
            held.append(rows[:, :130] if tensor.role in ("key", "value") else rows)  # the bucket's part of the cache
        logits += [requests.decode({2: int(token)})[0] for token in prompt.continuation]
        results.append((logits, held))
    (logits, held), (logits_after_nan, held_after_nan) = results
    assert len(logits) == 1 + DECODE_STEPS
    for expected, actual in zip([*logits, *held], [*logits_after_nan, *held_after_nan], strict=True):
        assert expected.isfinite().all() and torch.equal(bits(expected), bits(actual))


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_every_state_is_read_where_a_request_goes_on_and_none_where_it_starts(name: str) -> None:
    application = lowered(name, **ALL_GRAPHS)
    calls = {DECODE: ([[5]], 70), CONTINUATION: ([[5] * 60], 70), VERIFY: ([[5] * 4], 70), CONTEXT: ([[5] * 60], 0)}
    generator = torch.Generator().manual_seed(0)
    first = Hosted(application, fill=0.0)
    initial = {state: torch.randn(first.values[state].shape, generator=generator) for state in first.state_names}

    def run(tag: str, **changed: Tensor) -> Tensor:
        hosted = Hosted(application)
        hosted.values |= initial | changed
        tokens, start = calls[tag]
        logits = hosted.forward(tokens, [start], [2])
        assert hosted.calls[0][0] == tag
        return logits

    for tag in calls:
        expected = run(tag)
        assert expected.isfinite().all()
        for state in first.state_names:
            other = initial[state].clone()
            other[2] = torch.randn(other[2].shape, generator=generator)
            assert torch.equal(run(tag, **{state: other}), expected) == (tag == CONTEXT), (tag, state)
