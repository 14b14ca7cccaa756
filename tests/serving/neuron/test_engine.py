"""The plugin serves this project's NxDI model: real vLLM 0.16, vllm-neuron 0.5.0 and NxDI, on the CPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from nxdi_qwen.compile.manifest import NEURON_CONFIG
from nxdi_qwen.modeling.config import FULL_ATTENTION
from nxdi_qwen.modeling.config_loader import load_config
from tests.serving import stored
from tests.serving.neuron.conftest import SLOTS, Run

pytestmark = pytest.mark.vllm_neuron

TURNED_OFF = "Prefix caching is turned off"
WORKER = "nxdi_qwen.serving.neuron_plugin_worker.HybridNeuronWorker"
PLUGIN_WORKER = "vllm_neuron.worker.neuron_worker.NeuronWorker"

Engine = Callable[..., Run]


def check_tokens(completions: Sequence[stored.Greedy], run: Run) -> None:
    assert run.results is not None, run.log[-4000:]
    for completion, tokens in zip(completions, run.results["tokens"], strict=True):
        completion.check(tokens)
    assert stored.near_ties(completions) <= stored.NEAR_TIES_ALLOWED


@pytest.mark.parametrize("name", stored.FAMILIES)
def test_ragged_requests(engine: Engine, name: str) -> None:
    """Sixteen on four slots: every slot has several requests, one after the other."""
    completions = stored.references(name).completions[:16]
    assert len({len(completion.prompt) for completion in completions}) == 16
    run = engine(name, completions)
    check_tokens(completions, run)
    results = run.results
    assert (results["platform"], results["worker"]) == ("vllm_neuron.platform", WORKER)
    assert results["most_running"] == SLOTS
    assert TURNED_OFF not in run.log  # nobody asked for it
    check_cache(name, results)


def check_cache(name: str, results: dict[str, Any]) -> None:
    """The true state in every layer; a pool for exactly four requests, of which all is free again."""
    model = load_config(stored.checkpoint(name)).config
    linear = {
        "type": "MambaSpec",
        "block_size": stored.MAX_LENGTH,
        "mamba_cache_mode": "none",
        "shapes": [
            [model.linear_conv_kernel_dim - 1, model.conv_dim],
            [model.linear_num_value_heads, model.linear_value_head_dim, model.linear_key_head_dim],
        ],
        "dtypes": ["torch.float32", "torch.float32"],
    }
    attention = {
        "type": "FullAttentionSpec",
        "num_kv_heads": model.num_key_value_heads,
        "head_size": model.head_dim,
    }
    found = {}
    per_request = 0
    for group, most in zip(results["groups"], results["most_blocks"], strict=True):
        for layer in group["layers"]:
            kind = attention if layer.endswith(".self_attn") else linear
            assert {key: group[key] for key in kind} == kind, layer
            found[layer] = group["page"]
        if group["type"] == "MambaSpec":
            assert most == 1
        per_request += math.ceil(stored.MAX_LENGTH / group["block_size"])
    assert set(found) == {
        f"layers.{index}.{'self_attn' if kind == FULL_ATTENTION else 'linear_attn'}"
        for index, kind in enumerate(model.layer_types)
    }
    assert len(set(found.values())) == 1
    assert results["blocks"] == SLOTS * per_request + 1 and results["free_blocks"] == results["blocks"] - 1
    # A page is the least number of 16 tokens that a state fits in.
    token = 2 * model.num_key_value_heads * model.head_dim * 4
    state = 4 * sum(math.prod(shape) for shape in linear["shapes"])
    assert state <= found["layers.0.linear_attn"] < state + 16 * token


@pytest.mark.parametrize("name", stored.TEXT_FORMS)
def test_text_models(engine: Engine, name: str) -> None:
    """Flat configurations of another architecture's name, with tied heads."""
    completions = stored.references(name).completions
    check_tokens(completions, engine(name, completions))


@pytest.mark.parametrize("name", stored.FAMILIES)
def test_prefix_caching_is_turned_off(engine: Engine, name: str) -> None:
    """Every prompt twice: with hits for keys and values alone, the second answer would be wrong."""
    completions = [each for each in stored.references(name).completions[6:12] for _ in range(2)]
    run = engine(name, completions, enable_prefix_caching=True)
    check_tokens(completions, run)
    assert run.log.count(TURNED_OFF) == 1
    assert (run.results["prefix_caching"], run.results["mamba_cache_mode"]) == (False, "none")
    check_cache(name, run.results)


def test_requests_shorter_than_a_block(engine: Engine) -> None:
    """A state is as large as the keys and values of 48 tokens, and no request may have as many."""
    completions = [
        dataclasses.replace(each, tokens=each.tokens[:16], margins=each.margins[:16])
        for each in stored.references("qwen3_5").completions[:3]
    ]
    run = engine("qwen3_5", completions, max_model_len=32)
    check_tokens(completions, run)
    assert run.results["blocks"] == SLOTS * 4 + 1


def test_sampling_on_the_device(engine: Engine) -> None:
    """The plugin's default; greedy requests have the same tokens."""
    completions = stored.references("qwen3_5").completions[:6]
    options = {"on_device_sampling_config": {"dynamic": True, "deterministic": True}}
    check_tokens(completions, engine("qwen3_5", completions, options=options))


def test_another_model_is_left_to_the_plugin(engine: Engine) -> None:
    """With and without this package among vLLM's plugins."""
    completions = stored.references(stored.LLAMA).completions[:8]
    run = engine(stored.LLAMA, completions, enable_prefix_caching=False)
    check_tokens(completions, run)
    assert run.results["worker"] == PLUGIN_WORKER
    (group,) = run.results["groups"]
    assert (group["layers"], group["num_kv_heads"]) == (["layers.0.self_attn", "layers.1.self_attn"], 1)
    without = engine(stored.LLAMA, completions, enable_prefix_caching=False, environment={"VLLM_PLUGINS": "neuron"})
    assert without.results == run.results


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"num_gpu_blocks_override": 60}, "61 blocks are too few for 4 requests of up to 768 tokens, which take 77"),
        ({"environment": {"DISABLE_NEURON_CUSTOM_SCHEDULER": "1"}}, "chunked prefill is not supported for a model"),
        ({"options": {"batch_size": 2}}, "4 requests at once and the compiled model holds 2: give --max-num-seqs 2"),
        (
            {"options": {"seq_len": 256, "max_context_length": 256}},
            "requests may have 768 tokens and the compiled model's slots hold 256: give --max-model-len 256",
        ),
    ],
    ids=["blocks", "chunks", "slots", "length"],
)
def test_what_does_not_fit_is_refused(engine: Engine, case: dict[str, Any], message: str) -> None:
    assert message in engine("qwen3_5", [], **case).failure


def test_a_compiled_model_that_is_refused_is_not_compiled_over(engine: Engine, tmp_path: Path) -> None:
    """The plugin would take the refusal for a missing model."""
    from nxdi_qwen.parity.targets.nxdi_application import application

    config = application(stored.checkpoint("qwen3_5"), batch_size=SLOTS, seq_len=stored.MAX_LENGTH).config
    config.neuron_config.async_mode = True
    config.save(tmp_path)
    before = (tmp_path / NEURON_CONFIG).read_bytes()
    run = engine("qwen3_5", stored.references("qwen3_5").completions[:1])
    assert "async_mode=True is not supported" in run.failure and "Recompiling" not in run.log
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {NEURON_CONFIG: before}
