"""What the runner declares at other degrees than 1, which no engine here can run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nxdi_qwen.modeling.config_loader import load_config
from tests.nxdi.references import write_checkpoint

pytestmark = pytest.mark.vllm_neuron


@pytest.fixture
def declared(tmp_path: Path) -> Callable[[int], dict[str, Any]]:
    """The specifications by layer, of a loaded model's configuration at this degree."""
    from nxdi_qwen.serving.neuron_plugin_worker import HybridModelRunner  # isort: skip  # with stand-ins for the SDK
    from nxdi_qwen.modeling.nxdi.config import HybridInferenceConfig, HybridNeuronConfig

    model = load_config(write_checkpoint("qwen3_5", tmp_path)).config

    def specs(degree: int) -> dict[str, Any]:
        options = HybridNeuronConfig(tp_degree=degree, batch_size=4, seq_len=160, torch_dtype="bfloat16")
        runner = object.__new__(HybridModelRunner)
        runner.model = SimpleNamespace(model=SimpleNamespace(config=HybridInferenceConfig.for_model(model, options)))
        runner.cache_config = SimpleNamespace(block_size=1024, mamba_block_size=160, mamba_page_size_padded=1 << 20)
        return runner.get_kv_cache_spec()

    return specs


# Two KV heads, two key heads with three value heads each: above degree 2, ranks share a group.
@pytest.mark.parametrize(("degree", "heads", "key_heads", "value_heads"), [(1, 2, 2, 6), (2, 1, 1, 3), (4, 1, 1, 2)])
def test_of_one_rank(
    declared: Callable[[int], dict[str, Any]], degree: int, heads: int, key_heads: int, value_heads: int
) -> None:
    import torch

    specs = declared(degree)
    assert list(specs) == ["layers.0.linear_attn", "layers.1.linear_attn", "layers.2.linear_attn", "layers.3.self_attn"]
    attention = specs["layers.3.self_attn"]
    assert (attention.num_kv_heads, attention.head_size, attention.dtype) == (heads, 32, torch.bfloat16)
    for layer in range(3):
        linear = specs[f"layers.{layer}.linear_attn"]
        assert linear.shapes == ((3, 2 * key_heads * 32 + value_heads * 24), (value_heads, 24, 32))
        assert linear.dtypes == (torch.bfloat16, torch.float32)
        assert (linear.block_size, linear.page_size_bytes, linear.mamba_cache_mode) == (160, 1 << 20, "none")
