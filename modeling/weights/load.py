"""Carry out a plan: stream our parameters out of a checkpoint, one group at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from nxdi_qwen.modeling.rope_frequencies import rope_inv_freq
from nxdi_qwen.modeling.weights.checkpoint import Checkpoint
from nxdi_qwen.modeling.weights.layout import ROPE, weight_dtype, weight_specs
from nxdi_qwen.modeling.weights.plan import WeightPlan
from nxdi_qwen.modeling.weights.quantization import FP8, SCALE_SUFFIX, dequantize
from nxdi_qwen.modeling.weights.recipes import Recipe, Source


def stream_weights(plan: WeightPlan, checkpoint: Checkpoint, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) in the order of `weight_specs(plan.config, dtype)`.

    Tensors are contiguous, own their memory and have the specified dtype: A_log, dt_bias, the gated norm and
    `rope.inv_freq` are float32, all others `dtype`. At most one recipe's tensors (a layer's gate and up experts are the
    largest) are held at a time. Raises InputError where a file changed since its header was read.
    """
    owner = {recipe.targets[0]: recipe for recipe in plan.recipes}
    ready: dict[str, torch.Tensor] = {}
    for name in weight_specs(plan.config, dtype):
        if name == ROPE:
            yield name, rope_inv_freq(plan.config)
            continue
        if name in owner:
            ready = _build(owner[name], checkpoint, weight_dtype(name, dtype), plan.fp8_block)
        yield name, ready.pop(name)


def _build(
    recipe: Recipe, checkpoint: Checkpoint, dtype: torch.dtype, block: tuple[int, int]
) -> dict[str, torch.Tensor]:
    if not recipe.stacked:
        (source,) = recipe.sources
        parts = recipe.rearrange(_read(source, checkpoint, dtype, block))
        # A part of a larger tensor would keep all of it alive, and stands wherever the cut left it: copy it out.
        return {t: p if len(parts) == 1 else p.clone() for t, p in zip(recipe.targets, parts, strict=True)}
    result: dict[str, torch.Tensor] = {}
    for expert, source in enumerate(recipe.sources):
        parts = recipe.rearrange(_read(source, checkpoint, dtype, block))
        for target, part in zip(recipe.targets, parts, strict=True):
            if target not in result:
                result[target] = torch.empty(len(recipe.sources), *part.shape, dtype=dtype)
            result[target][expert] = part
    return result


def _read(source: Source, checkpoint: Checkpoint, dtype: torch.dtype, block: tuple[int, int]) -> torch.Tensor:
    tensor = checkpoint.read(source.name, source.index)
    if tensor.dtype != FP8:
        return tensor.to(dtype)
    return dequantize(tensor, checkpoint.read(source.name + SCALE_SUFFIX, source.index), block, dtype)
