"""The plugin's worker and runner for a hybrid model: the model is found, and its state is declared as it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

# First of all: in the place of a missing Neuron SDK, which the plugin's runner imports, stands a stand-in.
from nxdi_qwen.modeling.nxdi.register import register  # isort: skip
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm_neuron.worker.neuron_worker import NeuronWorker
from vllm_neuron.worker.neuronx_distributed_model_runner import NeuronxDistributedModelRunner

from nxdi_qwen.compile.manifest import NEURON_CONFIG
from nxdi_qwen.modeling.nxdi.config import HybridInferenceConfig
from nxdi_qwen.modeling.nxdi.model import describe
from nxdi_qwen.serving.cache_spec import pool_bytes, specs_in_blocks


class HybridModelRunner(NeuronxDistributedModelRunner):
    """Finds the model in NxDI's `MODEL_TYPES` and reads the state from the loaded model's own configuration."""

    def load_model(self) -> None:
        """Raises ValueError where the loaded model holds fewer or shorter requests than vLLM may run, and InputError
        where its options are refused.
        """
        register()
        compiled = Path(os.environ.get("NEURON_COMPILED_ARTIFACTS", ""))
        if (compiled / NEURON_CONFIG).is_file():
            # Here, since the plugin takes any ValueError of loading for a missing model, and compiles one over it.
            HybridInferenceConfig.load(str(compiled))
        super().load_model()
        config = self.inference_config
        slots, length = config.slots, config.neuron_config.max_length
        if self.max_num_reqs > slots:
            raise ValueError(
                f"vLLM may run {self.max_num_reqs} requests at once and the compiled model holds {slots}: give "
                f"--max-num-seqs {slots}, or compile again"
            )
        if self.max_model_len > length:
            raise ValueError(
                f"requests may have {self.max_model_len} tokens and the compiled model's slots hold {length}: give "
                f"--max-model-len {length}, or compile again"
            )

    @property
    def inference_config(self) -> HybridInferenceConfig:
        """Of the loaded model: with precompiled artifacts, it is theirs."""
        return self.model.model.config

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return specs_in_blocks(describe(self.inference_config), self.cache_config)


class HybridNeuronWorker(NeuronWorker):
    """Reports memory for exactly the requests that the model has slots for."""

    def get_neuronx_distributed_model_runner(self, vllm_config: Any, device: torch.device) -> HybridModelRunner:
        return HybridModelRunner(vllm_config=vllm_config, device=device)

    def determine_available_memory(self) -> int:
        """Bytes a rank. Raises ValueError where vLLM was told to count fewer blocks than the requests may take.

        The plugin's runner cannot resume a request that was preempted, so that must never happen.
        """
        groups = get_kv_cache_groups(self.vllm_config, self.get_kv_cache_spec())
        slots, length = self.scheduler_config.max_num_seqs, self.model_config.max_model_len
        available = pool_bytes(groups, slots, length)
        needed = available // pool_bytes(groups, 0, length)
        counted = self.cache_config.num_gpu_blocks_override
        if counted is not None and counted < needed:
            raise ValueError(
                f"{counted} blocks are too few for {slots} requests of up to {length} tokens, which take {needed}: "
                "leave out --num-gpu-blocks-override, or lower --max-num-seqs or --max-model-len"
            )
        return available
