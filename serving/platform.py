"""vLLM's platform: makes vLLM's configuration fit an artifact, before anything is loaded."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import Platform, PlatformEnum

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class NxdiQwenPlatform(Platform):
    """This host's processors, running the graphs of an artifact."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    _prompt_logprobs = True
    simple_compile_backend = "eager"  # of the sampler's small functions: compiling them takes longer than they run

    def __init__(self) -> None:
        # At shutdown vLLM empties the cache of the accelerator, also where there is none.
        if not torch.accelerator.is_available():
            torch.accelerator.empty_cache = torch.accelerator.empty_host_cache = _nothing

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "nxdi-qwen (cpu)"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """There is one."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.manual_seed(seed)

    @classmethod
    def inference_mode(cls) -> Any:
        return torch.inference_mode()

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None:
        """`check_and_update_config` has chosen the block sizes already: they need no attention backend."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Raises ValueError, with what to change, where vLLM was asked for what the artifact cannot do."""
        if vllm_config.model_config is None:  # vLLM also makes configurations without a model
            return
        # vLLM imports this module while it imports its own configuration.
        from nxdi_qwen.serving.configure import fit_to_artifact

        cls._prompt_logprobs = fit_to_artifact(vllm_config).prompt_logprobs

    @classmethod
    def validate_request(cls, *arguments: Any, **named: Any) -> None:
        """Raises ValueError for what the artifact cannot answer. (Versions of vLLM differ in what else they pass.)"""
        for params in (*arguments, *named.values()):
            if getattr(params, "prompt_logprobs", None) is not None and not cls._prompt_logprobs:
                raise ValueError("prompt_logprobs cannot be had from an artifact for Neuron: leave it out")


def _nothing() -> None:
    pass
