"""What the lowered graphs consist of: fixtures at several degrees, and the shapes of public models."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import nxdi_qwen.modeling
from nxdi_qwen.modeling.config import FULL_ATTENTION, LINEAR_ATTENTION, ModelConfig
from nxdi_qwen.modeling.config_loader import load_config
from nxdi_qwen.modeling.ops import attention
from nxdi_qwen.modeling.presets import preset
from tests.nxdi.hosted import CONTEXT, CONTINUATION, ONE_BUCKET
from tests.nxdi.references import FAMILY_NAMES, FOLDER, NAMES

if TYPE_CHECKING:
    from nxdi_qwen.compile.hlo import GraphName
    from nxdi_qwen.compile.lowering import LoweredGraph
    from nxdi_qwen.modeling.nxdi.causal_lm import NeuronHybridForCausalLM

pytestmark = pytest.mark.nxdi
OWN_CODE = str(Path(nxdi_qwen.modeling.__path__[0]).resolve())


def application(config: ModelConfig, **options: Any) -> NeuronHybridForCausalLM:
    """An application without a checkpoint."""
    from nxdi_qwen.modeling.nxdi.causal_lm import NeuronHybridForCausalLM
    from nxdi_qwen.modeling.nxdi.config import HybridInferenceConfig, HybridNeuronConfig

    lists = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
    options = HybridNeuronConfig(enable_bucketing=True, **lists)
    return NeuronHybridForCausalLM("", HybridInferenceConfig.for_model(config, options))


def lower(app: NeuronHybridForCausalLM, rank: int = 0) -> dict[GraphName, LoweredGraph]:
    from nxdi_qwen.compile.hlo import lower_application

    return lower_application(app, rank, "meta")


def assert_can_be_compiled(graphs: dict[GraphName, LoweredGraph]) -> None:
    """Only known opcodes or those listed with evidence, rank 4, static shapes, threaded states; 64-bit floating point
    only where NxD's own router asks for it."""
    from nxdi_qwen.compile.hlo_report import report

    for name, graph in graphs.items():
        found = report(graph)
        print(f"{name}: {found.instructions} instructions, {len(graph.proto)} bytes; largest: {found.largest}")
        assert [line for line in found.problems if not line.startswith("64-bit floating point")] == [], name
        assert found.max_rank <= 4 and found.custom_calls == {} and found.dynamic_shapes == (), name
        assert set(found.extra_opcodes) <= {"log", "and"}, name
        assert not [place for place in found.float64 if OWN_CODE in place], name
        # At several degrees torch_xla hands each all-reduce the scalar that orders them.
        assert all(tensor.dim() == 0 for tensor in graph.constants.values()), name


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_graphs_of_the_fixtures(name: str, degree: int) -> None:
    """Every rank's graph is the same, byte for byte: a rank's number is an input."""
    family = name in FAMILY_NAMES  # the others have fewer graphs, to save time
    options = ONE_BUCKET | {"torch_dtype": torch.float32}
    if family:
        options |= {"continuation_buckets": (70,), "speculation_length": 4}
    app = application(load_config(FOLDER / name).config, tp_degree=degree, **options)
    ranks = (0, degree - 1) if family and degree > 1 else (0,)
    # One call for all: a graph holds the lines that it was traced from.
    first, *others = (lower(app, rank) for rank in ranks)
    assert len(first) == (4 if family else 2)
    assert_can_be_compiled(first)
    for last in others:
        for graph_name, graph in first.items():
            assert last[graph_name].proto == graph.proto, graph_name
            assert last[graph_name].parameters == graph.parameters


def attention_places(graph: LoweredGraph) -> dict[str, int]:
    """Elements of the computed tensors of attention over the cache, by place."""
    from nxdi_qwen.compile import hlo_proto
    from nxdi_qwen.compile.hlo_report import place

    return {
        place(each): hlo_proto.element_count(each.shape)
        for computation in hlo_proto.parse_module(graph.proto).computations
        for each in computation.instructions
        if each.metadata.source_file.endswith("ops/attention.py")
    }


@pytest.mark.parametrize(("name", "degree"), [("qwen3.5-0.8b", 1), ("qwen3.5-27b", 8), ("qwen3.5-35b-a3b", 4)])
def test_graphs_of_public_models(name: str, degree: int) -> None:
    """Their shapes with four of their layers, in bfloat16, without memory for the weights."""
    model, layers = preset(name), 4
    model = dataclasses.replace(
        model,
        num_hidden_layers=layers,
        layer_types=model.layer_types[:layers],
        moe_layers=model.moe_layers[:layers],
    )
    app = application(
        model,
        tp_degree=degree,
        torch_dtype=torch.bfloat16,
        batch_size=4,
        ctx_batch_size=1,
        is_continuous_batching=True,
        seq_len=4096,
        max_context_length=2048,
        context_encoding_buckets=(512, 2048),
        token_generation_buckets=(4096,),
        continuation_buckets=(2048,),
    )
    graphs = lower(app)
    assert_can_be_compiled(graphs)
    heads = model.num_attention_heads // degree
    scores = heads * attention.QUERY_BLOCK
    for (tag, bucket), graph in graphs.items():
        if tag in (CONTEXT, CONTINUATION):
            visible = bucket if tag == CONTEXT else 4096
            sizes = attention_places(graph)
            assert max(sizes.values()) == scores * visible, (tag, bucket, max(sizes, key=lambda key: sizes[key]))


def long_prompts(config: ModelConfig) -> dict[GraphName, LoweredGraph]:
    """One GDN and one attention layer, for prompts of 2048 and 4096 tokens."""
    config = dataclasses.replace(
        config, num_hidden_layers=2, layer_types=(LINEAR_ATTENTION, FULL_ATTENTION), moe_layers=(False, False)
    )
    app = application(
        config,
        torch_dtype=torch.float32,
        batch_size=1,
        seq_len=4096,
        max_context_length=4096,
        context_encoding_buckets=(2048, 4096),
        token_generation_buckets=(4096,),
    )
    return lower(app)


def assert_grows_with_the_prompt_only(config: ModelConfig) -> None:
    from nxdi_qwen.compile import hlo_proto

    graphs = long_prompts(config)
    shapes = [
        [hlo_proto.element_count(shape) for each in computation.instructions for shape in hlo_proto.arrays(each.shape)]
        for graph in (graphs[CONTEXT, 2048], graphs[CONTEXT, 4096])
        for computation in [hlo_proto.entry_computation(hlo_proto.parse_module(graph.proto))]
    ]
    short, long = (max(sizes) for sizes in shapes)
    assert long <= 2 * short, f"the largest tensor grows from {short} to {long}"
    assert len(shapes[1]) <= 2 * len(shapes[0])


def test_no_tensor_of_a_prefill_is_quadratic(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(FOLDER / "qwen3_5").config
    assert_grows_with_the_prompt_only(config)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 1 << 20)
    with pytest.raises(AssertionError, match="largest tensor grows from"):
        assert_grows_with_the_prompt_only(config)


@pytest.mark.slow
def test_graphs_of_long_prompts_stay_small() -> None:
    """At the 0.8B shape, one period of its layers: instructions for 32,768 tokens against those for 512."""
    from nxdi_qwen.compile.hlo_report import report

    model = preset("qwen3.5-0.8b")
    period = dataclasses.replace(
        model, num_hidden_layers=4, layer_types=model.layer_types[:4], moe_layers=model.moe_layers[:4]
    )
    app = application(
        period,
        torch_dtype=torch.bfloat16,
        batch_size=1,
        seq_len=32768,
        max_context_length=32768,
        context_encoding_buckets=(512, 2048, 32768),
        token_generation_buckets=(32768,),
    )
    graphs = lower(app)
    short, middle, long = (report(graphs[CONTEXT, bucket]).instructions for bucket in (512, 2048, 32768))
    print(f"{short} instructions for 512 tokens, {middle} for 2,048, {long} for 32,768: {long / short:.2f} times")
    assert long <= 3 * short
