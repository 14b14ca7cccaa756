"""The graphs that NxDI traces, run on XLA's CPU backend, give Hugging Face's logits, and controls that must not.

States go from graph to graph by the alias table of the lowered module alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch

from tests.nxdi.hosted import BUCKETS, CONTEXT, DECODE, ONE_BUCKET, Hosted, Requests, assert_close, lowered
from tests.nxdi.references import DECODE_STEPS, FAMILY_NAMES, NAMES, reference

pytestmark = pytest.mark.nxdi
# Lengths that are decoded together, each group's longest crossing from bucket to bucket.
GROUPS = ((1, 2, 3, 4), (63, 64, 65), (130,))


def assert_parity(hosted: Hosted, name: str, lengths: Sequence[int], slots: Sequence[int] = (2, 0, 3, 1)) -> None:
    """Prompts of `lengths`, one in each of `slots`, and 16 tokens after them, all prompts together."""
    requests = Requests(hosted)
    prompts = [reference(name).prompts[length] for length in lengths]
    slots = slots[: len(lengths)]
    for slot, prompt in zip(slots, prompts, strict=True):
        assert_close(requests.prefill(slot, prompt.ids), prompt.logits[0], f"{len(prompt.ids)} tokens")
    for step in range(DECODE_STEPS):
        tokens = {slot: int(prompt.continuation[step]) for slot, prompt in zip(slots, prompts, strict=True)}
        expected = torch.stack([prompt.logits[step + 1] for prompt in prompts])
        assert_close(requests.decode(tokens), expected, f"{lengths} and {step + 1} tokens")


@pytest.mark.parametrize("name", NAMES)
def test_every_bucket_gives_hugging_faces_logits(name: str) -> None:
    hosted = Hosted(lowered(name, **BUCKETS))
    for lengths in GROUPS:
        assert_parity(hosted, name, lengths)
    chosen = [bucket for tag, bucket in hosted.calls if tag == CONTEXT]
    assert chosen == [2, 4, 4, 64, 64, 130, 130, 130]
    assert {bucket for tag, bucket in hosted.calls if tag == DECODE} == {8, 72, 146}


def edit_aliases(hosted: Hosted, edit: Callable[[dict[str, int]], dict[str, int]]) -> None:
    """Rewrites the alias table (state -> output) of every graph, in the module itself."""
    from nxdi_qwen.compile import hlo_proto

    for route, graph in hosted.graphs.items():
        module = hlo_proto.parse_module(graph.proto)
        entries = module.input_output_alias.entries
        table = edit({graph.parameters[entry.parameter_number]: entry.output_shape_index[0] for entry in entries})
        del entries[:]
        for name, index in table.items():
            entries.add(output_shape_index=[index], parameter_number=graph.parameters.index(name))
        hosted.graphs[route] = copy.copy(graph)
        hosted.graphs[route].proto = module.SerializeToString()


def states_not_threaded(hosted: Hosted) -> None:
    edit_aliases(hosted, lambda table: {})


def swap(first: str, second: str) -> Callable[[Hosted], None]:
    """Exchanges two states of one shape, given by layer and role."""

    def plant(hosted: Hosted) -> None:
        names = {tensor.name: name for tensor, name in zip(hosted.description.tensors, hosted.state_names, strict=True)}
        a, b = names[first], names[second]
        edit_aliases(hosted, lambda table: table | {a: table[b], b: table[a]})

    return plant


def padding_unmasked(hosted: Hosted) -> None:
    hosted.before = lambda inputs: [inputs[0], torch.ones_like(inputs[1]), *inputs[2:]]


def scale(name: str) -> Callable[[Hosted], None]:
    def plant(hosted: Hosted) -> None:
        hosted.values[name] = hosted.values[name] * 1.01

    return plant


FAULTS: dict[str, Callable[[Hosted], None]] = {
    "states not threaded": states_not_threaded,
    "key and value swapped": swap("layers.3.key", "layers.3.value"),
    "recurrent states swapped": swap("layers.0.recurrent", "layers.1.recurrent"),
    "conv states swapped": swap("layers.1.conv", "layers.2.conv"),
    "padding unmasked": padding_unmasked,
    "attention weight times 1.01": scale("layers.3.self_attn.v_proj.weight"),
    "GDN weight times 1.01": scale("layers.1.linear_attn.out_proj.weight"),
}


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_planted_faults_are_noticed(name: str) -> None:
    application = lowered(name, **ONE_BUCKET)
    assert_parity(Hosted(application, fill=0.0), name, (65,))
    for fault, plant in FAULTS.items():
        hosted = Hosted(application, fill=0.0)  # with NaN, some faults would be too easy to notice
        plant(hosted)
        with pytest.raises(AssertionError, match=r"rel \d\.\d+e[-+]0[0-4]"):
            assert_parity(hosted, name, (65,))
            pytest.fail(f"not noticed: {fault}")
