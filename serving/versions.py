"""All that differs between the versions of vLLM that are supported: 0.16 and 0.32."""

from __future__ import annotations

from typing import Any

import torch
from packaging.version import Version
from pydantic import ValidationError
from vllm import __version__ as VLLM_VERSION
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.worker.gpu_input_batch import InputBatch

from nxdi_qwen.modeling.errors import InputError

_NEW = Version(VLLM_VERSION) >= Version("0.24")


def mamba_spec(
    shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...], block_size: int, page_size_padded: int
) -> MambaSpec:
    """A GDN layer's specification, one state a request (no prefix caching)."""
    kind: Any = "gdn_attention"
    if _NEW:
        from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

        kind = MambaAttentionBackendEnum.GDN_ATTN
    return MambaSpec(
        block_size=block_size, shapes=shapes, dtypes=dtypes, page_size_padded=page_size_padded, mamba_type=kind
    )


def make_input_batch(config: VllmConfig, device: torch.device) -> InputBatch:
    """vLLM's own record of the sampling options of the requests that run. Its block table is not used: one column."""
    slots, length = config.scheduler_config.max_num_seqs, config.model_config.max_model_len
    own: dict[str, Any] = {"max_num_blocks_per_req": [1], "reasoning_config": config.reasoning_config} if _NEW else {
        "pin_memory": False, "kernel_block_sizes": [length],
    }  # fmt: skip
    return InputBatch(
        max_num_reqs=slots,
        max_model_len=length,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        device=device,
        vocab_size=config.model_config.get_vocab_size(),
        block_sizes=[length],
        logitsprocs=build_logitsprocs(config, device, False, False, config.model_config.logits_processors or ()),
        logitsprocs_need_output_token_ids=bool(config.model_config.logits_processors),
        **own,
    )


def serve(arguments: list[str]) -> None:
    """`vllm serve` with these arguments. Not by vLLM's main function, which asks for a version of a distribution named
    vllm: its builds for CPUs have another name. Raises InputError for a configuration that vLLM refuses.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if _NEW:
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    else:
        from vllm.entrypoints.utils import cli_env_setup

    cli_env_setup()
    parser, command = FlexibleArgumentParser(prog="nxdi-qwen-serve"), ServeSubcommand()
    command.subparser_init(parser.add_subparsers())
    options = parser.parse_args(["serve", *arguments])
    command.validate(options)
    try:
        command.cmd(options)
    except ValidationError as error:
        reasons = (item["msg"].removeprefix("Value error, ") for item in error.errors())
        raise InputError("; ".join(reasons)) from error


def compilation_times() -> Any:
    """What a worker returns that compiled nothing."""
    if not _NEW:
        return 0.0
    from vllm.v1.worker.worker_base import CompilationTimes

    return CompilationTimes(0.0, 0.0)
