"""What vLLM is told of the state, and how many requests its own manager admits by it."""

from __future__ import annotations

from math import prod

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from nxdi_qwen.modeling.partition import Parallel
from nxdi_qwen.modeling.presets import PRESETS
from nxdi_qwen.modeling.state import describe_state
from nxdi_qwen.serving.cache_spec import choose_blocks, kv_cache_specs
from tests.serving.accounting import REQUESTS, account

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize("name", PRESETS)
def test_specifications_hold_the_true_bytes_of_a_rank(name: str, degree: int) -> None:
    config = PRESETS[name]
    description = describe_state(config, 1, 4096, torch.bfloat16, Parallel(degree))
    blocks = choose_blocks(description)
    specs = kv_cache_specs(
        description, block_size=blocks.tokens, mamba_block_size=4096, page_size_padded=blocks.page_bytes
    )
    assert len(specs) == config.num_hidden_layers
    for spec, (first, second) in zip(
        specs.values(), zip(description.tensors[::2], description.tensors[1::2], strict=True), strict=True
    ):
        assert spec.page_size_bytes == blocks.page_bytes
        true_bytes = first.bytes_per_slot + second.bytes_per_slot
        if isinstance(spec, MambaSpec):
            sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
            assert sum(sizes) == true_bytes <= blocks.page_bytes
            assert spec.dtypes == (torch.bfloat16, torch.float32)
        else:
            assert isinstance(spec, FullAttentionSpec)
            assert spec.page_size_bytes * 4096 == true_bytes * blocks.tokens
    # The smallest aligned block whose page holds a state.
    states = [spec for spec in specs.values() if isinstance(spec, MambaSpec)]
    state_bytes = sum(
        prod(shape) * dtype.itemsize
        for shape, dtype in zip(*map(tuple, (states[0].shapes, states[0].dtypes)), strict=True)
    )
    assert blocks.tokens % 16 == 0 and blocks.page_bytes * (blocks.tokens - 16) < state_bytes * blocks.tokens


@pytest.mark.parametrize(("name", "degree"), [("qwen3.5-0.8b", 1), ("qwen3-next-80b-a3b", 4), ("qwen3.5-27b", 8)])
def test_a_pool_for_eight_requests_admits_eight_and_is_full(name: str, degree: int) -> None:
    result = account(name, PRESETS[name], degree)
    assert (result.long, result.free_blocks) == (REQUESTS, 0)
    assert result.old_long == REQUESTS // 4  # attention in a quarter of the layers, declared in all
