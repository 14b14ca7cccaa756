"""How vLLM is started on an artifact: the options that follow from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nxdi_qwen.compile.text import TOKENIZER_FILE
from nxdi_qwen.modeling.config_loader import CONFIG_FILE
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.serving.targets import open_target


def engine_arguments(artifact: Path) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`; with `_` as `-`, options of `vllm serve`.

    Raises InputError for a folder that is no intact artifact, or one without the checkpoint's configuration (made from
    a preset), which vLLM reads.
    """
    target = open_target(artifact)
    if not (artifact / CONFIG_FILE).is_file():
        raise InputError(
            f"{artifact} was compiled from a preset and has no {CONFIG_FILE}: compile a checkpoint folder to serve it"
        )
    arguments: dict[str, Any] = {
        "model": str(artifact),
        "dtype": target.dtype,
        "enable_prefix_caching": False,  # as it is turned off, with a warning, where somebody asks for it
        "max_model_len": target.max_length,
        "max_num_seqs": target.slots,
        "tensor_parallel_size": target.processes,
        "served_model_name": target.name,
    }
    if not (artifact / TOKENIZER_FILE).is_file():
        arguments["skip_tokenizer_init"] = True
    return arguments
