"""vLLM's worker: one rank of an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import WorkerBase

from nxdi_qwen.serving import cache_spec, versions
from nxdi_qwen.serving.runner import Runner
from nxdi_qwen.serving.targets import open_target


class Worker(WorkerBase):
    """Loads a rank of the artifact and runs what vLLM's scheduler chooses. The state is the artifact's own slots."""

    runner: Runner

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        parallel = self.parallel_config
        init_distributed_environment(
            parallel.world_size, self.rank, self.distributed_init_method, self.local_rank, backend="gloo"
        )
        ensure_model_parallel_initialized(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        set_random_seed(self.model_config.seed)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        target = open_target(Path(self.model_config.model))
        self._description = target.description
        self.runner = Runner(self.vllm_config, target.load(self.rank))

    def get_model(self) -> nn.Module:
        raise NotImplementedError("an artifact is graphs, there is no module")

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBHNC"]  # vLLM allocates nothing here: any layout whose layers lie one after the other

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return cache_spec.specs_in_blocks(self._description, self.cache_config)

    def determine_available_memory(self) -> int:
        """Bytes of a pool that admits as many requests of the greatest length as vLLM may run at once."""
        groups = get_kv_cache_groups(self.vllm_config, self.get_kv_cache_spec())
        return cache_spec.pool_bytes(groups, self.scheduler_config.max_num_seqs, self.model_config.max_model_len)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Nothing to allocate: the slots were made with the model."""

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """vLLM 0.16 tells how many blocks it counts."""
        self.cache_config.num_gpu_blocks = num_gpu_blocks
        self.cache_config.num_cpu_blocks = num_cpu_blocks

    def compile_or_warm_up_model(self) -> Any:
        return versions.compilation_times()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        return self.runner.execute(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        return self.runner.sample(grammar_output)

    def synchronize_device(self) -> None:
        """Nothing runs behind our back."""

    def check_health(self) -> None:
        """A worker that answers is well."""
