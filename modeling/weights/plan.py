"""The plan: every tensor of a checkpoint accounted for, from the headers alone, before anything is allocated."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.weights.checkpoint import name_list
from nxdi_qwen.modeling.weights.header import TensorInfo
from nxdi_qwen.modeling.weights.quantization import FP8, SCALE_SUFFIX, fp8_block, refuse_mlx_conversion, scale_shape
from nxdi_qwen.modeling.weights.recipes import Recipe, Source, model_recipes

_PREFIXES = ("model.language_model.", "model.", "")
_UNUSED = {"vision": ("model.visual.", "visual."), "mtp": ("mtp.",)}
_HEAD = "lm_head.weight"
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class WeightPlan:
    """How a checkpoint becomes our parameters.

    `config` is the given one with `tie_word_embeddings` resolved; `notes` are lines worth showing; `unused` lists the
    "vision" and "mtp" tensors, which the text model does not use.
    """

    config: ModelConfig
    recipes: tuple[Recipe, ...]
    fp8_block: tuple[int, int]
    notes: tuple[str, ...]
    unused: dict[str, tuple[str, ...]]


def plan_weights(
    config: ModelConfig, checkpoint: Mapping[str, TensorInfo], quantization: Mapping[str, Any] | None = None
) -> WeightPlan:
    """Account for every tensor of a checkpoint; nothing is read beyond the headers.

    `quantization` is the configuration's `quantization_config` (or MLX's `quantization`). Raises InputError, naming the
    tensors with expected and actual shape, if any is missing, unexpected or misshapen, has no usable dtype, or if the
    checkpoint is quantised in another way than Qwen's FP8.
    """
    unused = {kind: tuple(n for n in checkpoint if n.startswith(starts)) for kind, starts in _UNUSED.items()}
    skipped = {name for names in unused.values() for name in names}
    used = {name: info for name, info in checkpoint.items() if name not in skipped}
    refuse_mlx_conversion({name: info.shape for name, info in used.items()}, config.linear_conv_kernel_dim)
    block = fp8_block(quantization, used)
    prefix = _prefix(used)
    config, notes = _resolve_head(config, _HEAD in used)
    notes += [f"{len(names)} {kind} tensors are not used by the text model" for kind, names in unused.items() if names]
    recipes = tuple(model_recipes(config, prefix, used))
    sources = {recipe.source.name: recipe.source for recipe in recipes}
    _check(sources, used, block)
    return WeightPlan(config, recipes, block, tuple(notes), unused)


def _prefix(names: Mapping[str, TensorInfo]) -> str:
    """What stands before `layers.N.`; the configuration does not tell, a flat one can come with nested names."""
    found = [p for p in _PREFIXES if any(name.startswith((f"{p}layers.", f"{p}embed_tokens.")) for name in names)]
    if not found:
        known = ", ".join(f"{prefix}layers.N" for prefix in _PREFIXES)
        raise InputError(f"the checkpoint has none of {known}; it holds {name_list(names) or 'no tensors'}")
    if len(found) > 1:
        raise InputError(f"the checkpoint holds two models: {' and '.join(f'{prefix}layers.N' for prefix in found)}")
    return found[0]


def _resolve_head(config: ModelConfig, has_head: bool) -> tuple[ModelConfig, list[str]]:
    if has_head and config.tie_word_embeddings:
        note = f"the checkpoint has {_HEAD}: the head is untied, although tie_word_embeddings is true"
        return dataclasses.replace(config, tie_word_embeddings=False), [note]
    if not has_head and not config.tie_word_embeddings:
        raise InputError(f"the checkpoint lacks {_HEAD} and tie_word_embeddings is false; fetch it or set the flag")
    return config, []


def _check(sources: Mapping[str, Source], used: Mapping[str, TensorInfo], block: tuple[int, int]) -> None:
    missing, unexpected, wrong = [], [], []
    scales: set[str] = set()
    for name, source in sources.items():
        info = used.get(name)
        if info is None:
            missing.append(name)
        elif info.shape != source.shape:
            wrong.append(f"{name} is {list(info.shape)}, expected {list(source.shape)}")
        elif info.dtype == FP8:
            scales.add(name + SCALE_SUFFIX)
            wrong += _scale_faults(name, source, used, block)
        elif info.dtype not in _FLOATS:
            wrong.append(f"{name} is {_dtype_name(info)}, expected a float type")
    for name in used:
        if name in sources or name in scales:
            continue
        owner = used.get(name.removesuffix(SCALE_SUFFIX))
        if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in sources:
            why = "without its weight" if owner is None else "of a weight that is not FP8"
            wrong.append(f"{name} is a scale {why}")
        else:
            unexpected.append(name)
    faults = [
        f"{len(group)} {what}: {name_list(group)}"
        for what, group in (("wrong", wrong), ("missing", missing), ("unexpected", unexpected))
        if group
    ]
    if faults:
        raise InputError(f"the checkpoint does not fit its configuration; tensors {'; '.join(faults)}")


def _scale_faults(name: str, source: Source, used: Mapping[str, TensorInfo], block: tuple[int, int]) -> list[str]:
    scale = used.get(name + SCALE_SUFFIX)
    if len(source.shape) != (2 if source.index is None else 3):
        return [f"{name} is FP8, which is read for matrices only"]
    if scale is None:
        return [f"{name} is FP8 without its scale {name}{SCALE_SUFFIX}"]
    expected = scale_shape(source.shape, block)
    if scale.shape != expected:
        return [f"{name}{SCALE_SUFFIX} is {list(scale.shape)}, expected {list(expected)}"]
    if scale.dtype not in _FLOATS:
        return [f"{name}{SCALE_SUFFIX} is {_dtype_name(scale)}, expected a float type"]
    return []


def _dtype_name(info: TensorInfo) -> str:
    return str(info.dtype).removeprefix("torch.")
