"""Carry out a plan: stream our parameters out of a checkpoint, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from nxdi_qwen.modeling.weights.blocks import Block, collect, rows_in_block
from nxdi_qwen.modeling.weights.checkpoint import Checkpoint
from nxdi_qwen.modeling.weights.layout import weight_dtype
from nxdi_qwen.modeling.weights.plan import WeightPlan
from nxdi_qwen.modeling.weights.quantization import FP8, SCALE_SUFFIX, dequantize
from nxdi_qwen.modeling.weights.recipes import Recipe, Source


def checkpoint_blocks(plan: WeightPlan, checkpoint: Checkpoint, dtype: torch.dtype) -> Iterator[Block]:
    """Every row of every parameter once, in the dtype of `weight_specs(plan.config, dtype)`, each tensor read once.

    Parameters come in the order of `weight_specs`, those of one checkpoint tensor together. Raises InputError where a
    file changed since its header was read.
    """
    for recipe in plan.recipes:
        yield from _blocks(recipe, checkpoint, weight_dtype(recipe.runs[0].target, dtype), plan.fp8_block)


def stream_weights(plan: WeightPlan, checkpoint: Checkpoint, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield whole (name, tensor) in the order of `weight_specs(plan.config, dtype)`; see `blocks.collect`.

    A_log, dt_bias, the gated norm and `rope.inv_freq` are float32, the buffer `rank` int64, all others `dtype`.
    """
    return collect(checkpoint_blocks(plan, checkpoint, dtype), plan.config, dtype)


def _blocks(recipe: Recipe, checkpoint: Checkpoint, dtype: torch.dtype, fp8_block: tuple[int, int]) -> Iterator[Block]:
    shape = recipe.source.matrix
    # A row of FP8 scales belongs to several rows of weights: no block begins within them.
    step = rows_in_block(shape, fp8_block[0] if checkpoint[recipe.source.name].dtype == FP8 else 1)
    for first in range(0, shape[0], step):
        rows = (first, min(first + step, shape[0]))
        data = _read(recipe.source, rows, checkpoint, dtype, fp8_block)
        begin = 0
        for run in recipe.runs:
            low, high = max(begin, rows[0]), min(begin + run.rows, rows[1])
            if low < high:
                *expert, row = run.start
                part = data[low - first : high - first]
                yield Block(run.target, (*expert, row + low - begin), part[None] if expert else part)
            begin += run.rows


def _read(
    source: Source, rows: tuple[int, int], checkpoint: Checkpoint, dtype: torch.dtype, block: tuple[int, int]
) -> torch.Tensor:
    tensor = checkpoint.read(source.name, source.index, rows)
    if tensor.dtype == FP8:
        scale_rows = (rows[0] // block[0], -(-rows[1] // block[0]))
        return dequantize(tensor, checkpoint.read(source.name + SCALE_SUFFIX, source.index, scale_rows), block, dtype)
    tensor = tensor.to(dtype)
    return tensor.flatten(1) if tensor.dim() > 1 else tensor  # a convolution is [channels, 1, kernel]
