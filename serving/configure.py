"""Makes vLLM's configuration fit an artifact, or says what does not."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from vllm.config import CompilationMode, VllmConfig

from nxdi_qwen.compile.source import DTYPES
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.serving.cache_spec import ALIGNMENT, set_blocks
from nxdi_qwen.serving.prefix_caching import turn_off
from nxdi_qwen.serving.targets import Target, open_target


def fit_to_artifact(vllm_config: VllmConfig) -> Target:
    """Chooses worker, dtype, scheduling and block sizes; returns what the artifact is.

    Raises ValueError, with what to change, where vLLM was asked for what the artifact cannot do.
    """
    target = _target(vllm_config)
    _check(vllm_config, target)
    model, scheduler, cache = vllm_config.model_config, vllm_config.scheduler_config, vllm_config.cache_config
    vllm_config.parallel_config.worker_cls = "nxdi_qwen.serving.worker.Worker"
    vllm_config.compilation_config.mode = CompilationMode.NONE
    model.dtype = DTYPES[target.dtype]
    # The next step needs this step's tokens on the host. Prompts are encoded whole, cut where this package cuts them,
    # so that a request's numbers do not depend on what runs beside it.
    scheduler.async_scheduling = False
    scheduler.enable_chunked_prefill = False
    scheduler.max_num_batched_tokens = max(
        scheduler.max_num_batched_tokens, model.max_model_len, scheduler.max_num_seqs
    )
    if cache.enable_prefix_caching:
        turn_off(vllm_config)
    set_blocks(cache, target.description, model.max_model_len, cache.block_size or ALIGNMENT)
    return target


def _target(vllm_config: VllmConfig) -> Target:
    try:
        return open_target(Path(vllm_config.model_config.model))
    except InputError as error:
        _refuse(str(error))


def _check(vllm_config: VllmConfig, target: Target) -> None:
    slots, processes = vllm_config.scheduler_config.max_num_seqs, vllm_config.parallel_config.tensor_parallel_size
    length = vllm_config.model_config.max_model_len
    if slots > target.slots:
        _refuse(
            f"vLLM may run {slots} requests at once and the artifact holds {target.slots}: give "
            f"--max-num-seqs {target.slots}, or compile with --batch-size {slots}"
        )
    if length > target.max_length:
        _refuse(
            f"requests may have {length} tokens and the artifact's slots hold {target.max_length}: give "
            f"--max-model-len {target.max_length}, or compile with --max-length {length}"
        )
    if processes != target.processes:
        _refuse(
            f"--tensor-parallel-size is {processes} and the artifact is run by {target.processes} processes: give "
            f"--tensor-parallel-size {target.processes}, or compile with another --degree"
        )
    for name, given in (
        ("--pipeline-parallel-size", vllm_config.parallel_config.pipeline_parallel_size > 1),
        ("--speculative-config", vllm_config.speculative_config is not None),
        ("--enable-lora", vllm_config.lora_config is not None),
        ("--kv-transfer-config", vllm_config.kv_transfer_config is not None),
    ):
        if given:
            _refuse(f"{name} is not supported with an artifact: leave it out")


def _refuse(why: str) -> NoReturn:
    raise ValueError(why)
