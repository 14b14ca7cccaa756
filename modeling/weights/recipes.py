"""Recipes: which checkpoint tensors become which of our parameters, and by which rearrangement.

A recipe only moves numbers, so dequantisation and the cast to the target dtype can come before it. The form of a layer
(fused or split projections, stacked or separate experts) is taken from the names in the file, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from nxdi_qwen.modeling.config import LINEAR_ATTENTION, ModelConfig
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.weights.layout import ROPE, Shape, weight_shapes

Rearrangement = Callable[[torch.Tensor], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor and the shape it must have; with `index`, only that slice of its first dimension is read."""

    name: str
    shape: Shape
    index: int | None = None


@dataclass(frozen=True)
class Recipe:
    """`rearrange` turns a source into one tensor per target.

    With `stacked`, each source gives one expert and the results are stacked along a new first dimension; otherwise
    there is exactly one source.
    """

    targets: tuple[str, ...]
    sources: tuple[Source, ...]
    rearrange: Rearrangement
    stacked: bool = False


def model_recipes(config: ModelConfig, prefix: str, names: Collection[str]) -> list[Recipe]:
    """The recipes of a whole model, their targets in the order of `weight_shapes` (without the derived ROPE).

    `prefix` stands before `layers.N.` in the checkpoint and `names` are the checkpoint's tensor names. Raises
    InputError where a layer has two forms at once.
    """
    shapes = weight_shapes(config)
    special: dict[str, Recipe | None] = {}  # target -> its recipe, None where an earlier target's recipe gives it too
    for layer, layer_type in enumerate(config.layer_types):
        ours, theirs = f"layers.{layer}.", f"{prefix}layers.{layer}."
        recipes: list[Recipe] = []
        if layer_type == LINEAR_ATTENTION:
            recipes += _gdn_recipes(config, f"{ours}linear_attn.", f"{theirs}linear_attn.", names, shapes)
        if config.moe_layers[layer]:
            recipes += _moe_recipes(config, f"{ours}mlp.", f"{theirs}mlp.", names, shapes)
        for recipe in recipes:
            special |= {target: recipe if target == recipe.targets[0] else None for target in recipe.targets}
    ordered: list[Recipe] = []
    for target, shape in shapes.items():
        if target in special:
            planned = special[target]
            if planned is not None:
                ordered.append(planned)
        elif target != ROPE:
            source = target if target == "lm_head.weight" else prefix + target
            ordered.append(_copy(target, Source(source, shape)))
    return ordered


def _gdn_recipes(
    config: ModelConfig, ours: str, theirs: str, names: Collection[str], shapes: dict[str, Shape]
) -> list[Recipe]:
    fused = ("in_proj_qkvz", "in_proj_ba")
    split = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    heads, ratio = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    key_width, value_width = config.linear_key_head_dim, ratio * config.linear_value_head_dim

    def rows_of(parts: str, kind: str) -> tuple[tuple[str, ...], list[int]]:
        targets = tuple(f"{ours}{part}_{kind}.weight" for part in parts)
        return targets, [shapes[target][0] for target in targets]

    def projection(source: str, parts: str, per_head: list[int] | None = None) -> Recipe:
        targets, rows = rows_of(parts, "proj")
        rearrange = partial(split_rows, rows=rows) if per_head is None else partial(ungroup, heads=heads, rows=per_head)
        return Recipe(targets, (Source(f"{theirs}{source}.weight", (sum(rows), config.hidden_size)),), rearrange)

    has_fused = any(f"{theirs}{name}.weight" in names for name in fused)
    has_split = any(f"{theirs}{name}.weight" in names for name in split)
    if has_fused and has_split:
        raise InputError(f"{theirs} has both fused ({', '.join(fused)}) and split ({', '.join(split)}) projections")
    if has_fused or (not has_split and config.family == "qwen3_next"):
        projections = [
            projection("in_proj_qkvz", "qkvz", [key_width, key_width, value_width, value_width]),
            projection("in_proj_ba", "ba", [ratio, ratio]),
        ]
    else:
        projections = [projection(name, name.removeprefix("in_proj_")) for name in split]
    targets, rows = rows_of("qkv", "conv")
    conv = Source(f"{theirs}conv1d.weight", (sum(rows), 1, config.linear_conv_kernel_dim))
    return [*projections, Recipe(targets, (conv,), partial(split_conv, rows=rows))]


def _moe_recipes(
    config: ModelConfig, ours: str, theirs: str, names: Collection[str], shapes: dict[str, Shape]
) -> list[Recipe]:
    experts = range(config.num_experts)
    parts = ("gate_proj", "up_proj", "down_proj")
    targets = {part: f"{ours}experts.{part}" for part in parts}
    stacked_names = (f"{theirs}experts.gate_up_proj", f"{theirs}experts.down_proj")
    has_stacked = any(name in names for name in stacked_names)
    has_separate = any(f"{theirs}experts.{expert}.{part}.weight" in names for expert in experts for part in parts)
    if has_stacked and has_separate:
        raise InputError(f"{theirs}experts has both stacked (gate_up_proj) and separate (0.gate_proj ...) experts")
    recipes = [_copy(f"{ours}router.weight", Source(f"{theirs}gate.weight", shapes[f"{ours}router.weight"]))]
    if has_stacked or (not has_separate and config.family == "qwen3_5_moe"):
        count, width, hidden = shapes[targets["gate_proj"]]
        gate_up, down = (count, 2 * width, hidden), shapes[targets["down_proj"]]
        halves = partial(split_rows, rows=[width, width])
        gate_up_sources = tuple(Source(stacked_names[0], gate_up, expert) for expert in experts)
        down_sources = tuple(Source(stacked_names[1], down, expert) for expert in experts)
        recipes.append(Recipe((targets["gate_proj"], targets["up_proj"]), gate_up_sources, halves, stacked=True))
        recipes.append(Recipe((targets["down_proj"],), down_sources, keep, stacked=True))
        return recipes
    for part, target in targets.items():
        sources = tuple(Source(f"{theirs}experts.{expert}.{part}.weight", shapes[target][1:]) for expert in experts)
        recipes.append(Recipe((target,), sources, keep, stacked=True))
    return recipes


def _copy(target: str, source: Source) -> Recipe:
    return Recipe((target,), (source,), keep)


def keep(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensor as it is."""
    return (tensor,)


def split_rows(tensor: torch.Tensor, rows: list[int]) -> Sequence[torch.Tensor]:
    """Cut [sum(rows), H] into consecutive parts [rows[i], H]."""
    return tensor.split(rows)


def split_conv(tensor: torch.Tensor, rows: list[int]) -> Sequence[torch.Tensor]:
    """Cut a depthwise convolution [sum(rows), 1, kernel] into consecutive channels [rows[i], kernel]."""
    return tensor.squeeze(1).split(rows)


def ungroup(tensor: torch.Tensor, heads: int, rows: list[int]) -> Sequence[torch.Tensor]:
    """Undo Qwen3-Next's grouping by key head.

    [heads * sum(rows), H], where each key head holds rows[0] rows of the first part, then rows[1] of the second and so
    on, becomes one [heads * rows[i], H] per part, heads in order.
    """
    grouped = tensor.view(heads, sum(rows), tensor.shape[-1])
    return [part.reshape(-1, tensor.shape[-1]) for part in grouped.split(rows, dim=1)]
