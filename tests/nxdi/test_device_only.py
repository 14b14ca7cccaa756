"""What NxDI does on a device only, where its CPU mode and the lowered graphs of this machine take another way: which
kernel the experts of prompts get, compiler flags, the layout of weights, options."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.presets import preset
from tests.nxdi.hosted import CONTEXT, CONTINUATION, DECODE, VERIFY

pytestmark = pytest.mark.nxdi
OPTIONS: dict[str, Any] = {
    "torch_dtype": torch.bfloat16,
    "batch_size": 2,
    "ctx_batch_size": 1,
    "is_continuous_batching": True,
    "enable_bucketing": True,
    "seq_len": 256,
    "max_context_length": 128,
    "context_encoding_buckets": [128],
    "token_generation_buckets": [256],
}


def application(name: str, **options: Any) -> Any:
    """The first four layers of a public model."""
    from nxdi_qwen.modeling.nxdi.causal_lm import NeuronHybridForCausalLM
    from nxdi_qwen.modeling.nxdi.config import HybridInferenceConfig, HybridNeuronConfig

    model = preset(name)
    model = dataclasses.replace(
        model, num_hidden_layers=4, layer_types=model.layer_types[:4], moe_layers=model.moe_layers[:4]
    )
    return NeuronHybridForCausalLM("", HybridInferenceConfig.for_model(model, HybridNeuronConfig(**OPTIONS | options)))


@pytest.fixture
def sdk() -> Iterator[list[str]]:
    """As if the SDK were installed; lists the ways through the experts that are taken while tracing."""
    from nxdi_qwen.modeling.nxdi import config  # isort: skip
    from neuronx_distributed.modules.moe import blockwise
    from neuronx_distributed.modules.moe.expert_mlps_v2 import ExpertMLPsV2

    taken = []

    def kernel(args: Any) -> Any:
        assert args.gate_up_proj_weight.dim() == 4 and args.conditions is not None
        taken.append("kernel")
        return args.hidden_states * 1

    all_experts = ExpertMLPsV2.forward_all_experts

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        taken.append("all experts")
        return all_experts(self, *args, **kwargs)

    with (
        patch.object(config, "SDK_IS_INSTALLED", True),
        # A closed enumeration of the SDK, and its kernel; those beside it raise in NxD itself.
        patch.object(blockwise, "ActivationFunction", lambda number: number),
        patch.object(blockwise, "_call_shard_on_intermediate_kernel", kernel),
        patch.object(ExpertMLPsV2, "forward_all_experts", counted),
        patch.object(
            ExpertMLPsV2, "torch_blockwise_matmul_inference", side_effect=AssertionError("a loop over blocks")
        ),
    ):
        yield taken


@pytest.mark.parametrize(
    ("name", "options", "way"),
    [
        ("qwen3.5-35b-a3b", {"tp_degree": 8}, "kernel"),
        ("qwen3.5-35b-a3b", {"tp_degree": 32}, "kernel"),
        ("qwen3.5-397b-a17b", {"tp_degree": 64}, "kernel"),
        ("qwen3-next-80b-a3b", {"tp_degree": 16}, "kernel"),
        ("qwen3.5-35b-a3b", {"tp_degree": 8, "logical_nc_config": 1}, "all experts"),
        ("qwen3.5-35b-a3b", {"tp_degree": 8, "blockwise_matmul_config": {"block_size": 1 << 20}}, "all experts"),
    ],
)
def test_experts_of_prompts_go_to_a_kernel_that_is_there(
    sdk: list[str], name: str, options: dict[str, Any], way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Never to one of those that NxD 0.18 names and does not have, nor to its loop over blocks of tokens."""
    from nxdi_qwen.compile.lowering import lower, named_tensors
    from nxdi_qwen.modeling.nxdi.tracing import as_rank, traced_modules

    app = application(name, **options)
    with as_rank(options["tp_degree"]):
        traced = next(each for each in traced_modules(app, "meta") if each.tag == CONTEXT)
        lower(traced.module, traced.inputs, named_tensors(traced.module), traced.aliases)
    assert sdk == [way] * 4
    chosen = "blockwise_matmul_config" not in options
    assert ("prompts compute all 256 experts" in caplog.text) == (way == "all experts" and chosen)


@pytest.mark.parametrize("options", [{}, {"blockwise_matmul_config": {"block_size": 256}}, {"logical_nc_config": 1}])
def test_a_saved_configuration_is_read_back(
    sdk: list[str], options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from nxdi_qwen.modeling.nxdi.config import HybridInferenceConfig

    config = application("qwen3.5-35b-a3b", tp_degree=8, **options).config
    config.save(tmp_path)
    again = HybridInferenceConfig.load(tmp_path)
    assert again.to_json_string() == config.to_json_string()
    assert "chooses_experts_kernel" not in caplog.text  # as NxDI names what it does not know


def test_pieces_are_compiled_like_prompts() -> None:
    app = application("qwen3.5-0.8b", continuation_buckets=[128], compiler_flags="--of-the-user")
    flags = {model.tag: model.compiler_args for model in app.models}
    assert flags[CONTINUATION] == flags[CONTEXT] != flags[DECODE]
    assert flags[CONTEXT].count("--of-the-user") == flags[DECODE].count("--of-the-user") == 1


@pytest.mark.parametrize(
    ("options", "first"),
    [({}, DECODE), ({"speculation_length": 4}, VERIFY), ({"continuation_buckets": [128]}, DECODE)],
)
def test_weights_are_laid_out_for_one_submodel(options: dict[str, Any], first: str) -> None:
    """Of two that ask, NxD would mark the weights in the first and lay them out as the last wants them."""
    app = application("qwen3.5-0.8b", **options)
    assert [model.tag for model in app.models if model.priority_model_idx is not None] == [first]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"async_mode": True}, "async_mode=True is not supported: a step that is issued ahead and dropped"),
        ({"early_expert_affinity_modulation": True}, "an expert's output is weighted, not its input"),
        ({"quantized_mlp_kernel_enabled": True}, "weights are in 16 or 32 bit"),
        ({"activation_quantization_type": "dynamic"}, "activations are in 16 or 32 bit"),
        ({"medusa_speculation_length": 4}, "there are no Medusa heads"),
        ({"capacity_factor": 1.0}, "no token is dropped"),
        ({"glu_type": "swiglu"}, "the experts are SwiGLU"),
        ({"gate_clamp_upper_limit": 7.0}, "the experts clamp nothing"),
        (
            {"tensor_capture_config": {"modules_to_capture": ["norm"]}, "on_device_sampling_config": {}},
            "every output behind the first is a state",
        ),
        ({"batch_size": 4, "ctx_batch_size": 2}, "ctx_batch_size 2 is neither 1 nor the batch size 4"),
    ],
)
def test_options_that_would_change_the_numbers_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        application("qwen3.5-35b-a3b", tp_degree=8, **options)


def test_logical_cores_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """NxDI prefers the environment, the runtime too: an option that says otherwise, or an artifact, would be obeyed by
    halves.
    """
    from nxdi_qwen.compile.cpu import CompileOptions
    from nxdi_qwen.compile.neuron import neuron_config
    from nxdi_qwen.compile.neuron_options import NeuronOptions
    from nxdi_qwen.compile.source import ModelSource

    source, shared = ModelSource.from_preset("qwen3.5-0.8b"), CompileOptions(max_length=512)
    cores = [
        neuron_config(source, NeuronOptions(shared, logical_cores=given)).logical_nc_config for given in (None, 1, 2)
    ]
    assert cores == [2, 1, 2]  # the stand-in of the SDK is a trn2
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert neuron_config(source, NeuronOptions(shared)).logical_nc_config == 1
    with pytest.raises(InputError, match=r"NEURON_LOGICAL_NC_CONFIG is 1, and logical_nc_config \(--logical-cores\) 2"):
        neuron_config(source, NeuronOptions(shared, logical_cores=2))
