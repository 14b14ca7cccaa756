"""How many requests vLLM's own KV cache manager admits: `python -m tests.serving.accounting [--json]`.

A pool that holds exactly `REQUESTS` requests of `LONG` tokens by the true state of a rank, for every public shape and
degree; and in the same bytes, what is admitted where every layer is declared as attention, as plugins without recurrent
state do. Requests are allocated one after the other in vLLM's manager until it refuses.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.request import Request

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.partition import Parallel, kv_heads
from nxdi_qwen.modeling.presets import PRESETS
from nxdi_qwen.modeling.state import describe_state
from nxdi_qwen.serving.cache_spec import choose_blocks, kv_cache_specs, pool_bytes

REQUESTS, LONG, SHORT = 8, 32768, 1024
DEGREES = (1, 2, 4, 8)
OLD_BLOCK = 16  # tokens, vLLM's default


@dataclass(frozen=True)
class Account:
    """`block_tokens` of an attention block; `request_bytes` of a request of `LONG` tokens, per rank; admitted requests
    of `LONG` and `SHORT` tokens, and blocks of the pool that are free when no other long one is admitted.
    """

    shape: str
    degree: int
    block_tokens: int
    request_bytes: int
    long: int
    free_blocks: int
    short: int
    old_long: int
    old_short: int


def account(shape: str, config: ModelConfig, degree: int, dtype: torch.dtype = torch.bfloat16) -> Account:
    """What vLLM counts for one rank."""
    parallel = Parallel(degree)
    description = describe_state(config, REQUESTS, LONG, dtype, parallel)
    blocks = choose_blocks(description)
    specs = kv_cache_specs(
        description, block_size=blocks.tokens, mamba_block_size=LONG, page_size_padded=blocks.page_bytes
    )
    vllm_config = VllmConfig()
    vllm_config.cache_config.kv_cache_layout = "LBHNC"
    pool = pool_bytes(get_kv_cache_groups(vllm_config, specs), REQUESTS, LONG)
    heads = kv_heads(config, 1, 1).part(parallel).size
    old: dict[str, KVCacheSpec] = {
        f"layers.{layer}.self_attn": FullAttentionSpec(
            block_size=OLD_BLOCK, num_kv_heads=heads, head_size=config.head_dim, dtype=dtype
        )
        for layer in range(config.num_hidden_layers)
    }
    long, free = admitted(vllm_config, specs, pool, LONG)
    return Account(
        shape,
        degree,
        blocks.tokens,
        pool // REQUESTS,
        long,
        free,
        admitted(vllm_config, specs, pool, SHORT)[0],
        admitted(vllm_config, old, pool, LONG)[0],
        admitted(vllm_config, old, pool, SHORT)[0],
    )


def admitted(vllm_config: VllmConfig, specs: dict[str, KVCacheSpec], pool: int, tokens: int) -> tuple[int, int]:
    """Requests of `tokens` tokens that vLLM's manager takes into `pool` bytes, and blocks that are free then."""
    groups = get_kv_cache_groups(vllm_config, specs)
    config = get_kv_cache_config_from_groups(vllm_config, groups, pool)
    scheduler, hashed = resolve_kv_cache_block_sizes(config, vllm_config)
    manager = KVCacheManager(config, LONG, scheduler, hashed, enable_caching=False)
    count = 0
    while True:
        request = Request(str(count), list(range(tokens)), SamplingParams(max_tokens=1), None)
        if manager.allocate_slots(request, tokens) is None:
            return count, manager.block_pool.get_num_free_blocks()
        count += 1


def accounts(degrees: Sequence[int] = DEGREES) -> list[Account]:
    """Of every public shape at every degree; names of one shape are joined."""
    shapes: dict[tuple[object, ...], list[str]] = {}
    for name, config in PRESETS.items():
        state = describe_state(config, 1, LONG, torch.bfloat16)
        shapes.setdefault(tuple(dataclasses.astuple(tensor) for tensor in state.tensors), []).append(name)
    return [account(", ".join(names), PRESETS[names[0]], degree) for names in shapes.values() for degree in degrees]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = accounts()
    if options.json:
        print(json.dumps([dataclasses.asdict(result) for result in results]))
        return 0
    table = Table(title=f"requests of {LONG:,} and {SHORT:,} tokens in one pool")
    headings = ("shape", "degree", "block", "MiB a request", "long", "short", "all attention: long", "short", "free")
    for heading in headings:
        table.add_column(heading)
    for row in results:
        cells = (row.shape, row.degree, row.block_tokens, f"{row.request_bytes / 2**20:.0f}", row.long, row.short)
        table.add_row(*map(str, (*cells, row.old_long, row.old_short, row.free_blocks)))
    Console(width=160).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
