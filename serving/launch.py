"""How vLLM is started on an artifact: the options that follow from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nxdi_qwen.compile.artifact import open_artifact
from nxdi_qwen.compile.text import TOKENIZER_FILE
from nxdi_qwen.modeling.config_loader import CONFIG_FILE
from nxdi_qwen.modeling.errors import InputError


def engine_arguments(artifact: Path) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`; with `_` as `-`, options of `vllm serve`.

    Raises InputError for a folder that is no intact artifact, or one without the checkpoint's configuration (made from
    a preset), which vLLM reads.
    """
    manifest = open_artifact(artifact)
    if CONFIG_FILE not in manifest.checkpoint_files:
        raise InputError(
            f"{artifact} was compiled from a preset and has no {CONFIG_FILE}: compile a checkpoint folder to serve it"
        )
    arguments: dict[str, Any] = {
        "model": str(artifact),
        "dtype": manifest.dtype,
        "enable_prefix_caching": False,  # as it is turned off, with a warning, where somebody asks for it
        "max_model_len": manifest.max_length,
        "max_num_seqs": manifest.slots,
        "tensor_parallel_size": manifest.degree,
        "served_model_name": manifest.source["name"],
    }
    if TOKENIZER_FILE not in manifest.checkpoint_files:
        arguments["skip_tokenizer_init"] = True
    return arguments
