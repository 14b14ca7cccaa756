"""Prefix caching needs recurrent states at block boundaries, which nothing keeps yet: it is turned off, and said."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.logger import init_logger

logger = init_logger("vllm.nxdi_qwen")


def turn_off(vllm_config: VllmConfig) -> None:
    """For a model with linear-attention layers: one state a request, as without the option."""
    cache = vllm_config.cache_config
    cache.enable_prefix_caching = False
    cache.mamba_cache_mode = "none"
    cache.mamba_block_size = vllm_config.model_config.max_model_len
    logger.warning(
        "Prefix caching is turned off: three quarters of this model's layers have a recurrent state, and their states "
        "at the ends of cached blocks are not kept. Every prompt is encoded from its first token."
    )
