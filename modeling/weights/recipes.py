"""Recipes: which rows of a checkpoint tensor become which rows of our parameters.

A recipe only moves rows, so dequantisation and the cast to the target dtype can come before it, and a tensor can be
read a few rows at a time. The form of a layer (fused or split projections, stacked or separate experts) is taken from
the names in the file, layer by layer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from nxdi_qwen.modeling.config import LINEAR_ATTENTION, ModelConfig
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.weights.layout import DERIVED, Shape, weight_shapes


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor and the shape it must have; with `index`, only that slice of its first dimension is read."""

    name: str
    shape: Shape
    index: int | None = None

    @property
    def matrix(self) -> Shape:
        """The shape of what is read; its first dimension are the rows."""
        return self.shape if self.index is None else self.shape[1:]


@dataclass(frozen=True)
class Run:
    """`rows` rows of a source, which become rows of `target` from `start` on: (row,), or (expert, row)."""

    target: str
    start: tuple[int, ...]
    rows: int


@dataclass(frozen=True)
class Recipe:
    """Where the rows of a source go: `runs` follow each other in it, from its first row to its last."""

    source: Source
    runs: tuple[Run, ...]


def model_recipes(config: ModelConfig, prefix: str, names: Collection[str]) -> list[Recipe]:
    """The recipes of a whole model, their targets in the order of `weight_shapes` (without the derived buffers).

    `prefix` stands before `layers.N.` in the checkpoint and `names` are the checkpoint's tensor names. Raises
    InputError where a layer has two forms at once.
    """
    shapes = weight_shapes(config)
    special: dict[str, list[Recipe]] = {}  # target -> recipes that begin with it
    for layer, layer_type in enumerate(config.layer_types):
        ours, theirs = f"layers.{layer}.", f"{prefix}layers.{layer}."
        recipes: list[Recipe] = []
        if layer_type == LINEAR_ATTENTION:
            recipes += _gdn_recipes(config, f"{ours}linear_attn.", f"{theirs}linear_attn.", names, shapes)
        if config.moe_layers[layer]:
            recipes += _moe_recipes(config, f"{ours}mlp.", f"{theirs}mlp.", names, shapes)
        for recipe in recipes:
            special.setdefault(recipe.runs[0].target, []).append(recipe)
    planned = {run.target for recipes in special.values() for recipe in recipes for run in recipe.runs}
    ordered: list[Recipe] = []
    for target, shape in shapes.items():
        if target in special:
            ordered += special[target]
        elif target not in planned and target not in DERIVED:
            source = target if target == "lm_head.weight" else prefix + target
            ordered.append(_split(Source(source, shape), {target: shape[0]}))
    return ordered


def _gdn_recipes(
    config: ModelConfig, ours: str, theirs: str, names: Collection[str], shapes: dict[str, Shape]
) -> list[Recipe]:
    fused = ("in_proj_qkvz", "in_proj_ba")
    split = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    heads = config.linear_num_key_heads

    def rows_of(parts: str, kind: str) -> dict[str, int]:
        targets = (f"{ours}{part}_{kind}.weight" for part in parts)
        return {target: shapes[target][0] for target in targets}

    def projection(source: str, parts: str, groups: int = 1) -> Recipe:
        rows = rows_of(parts, "proj")
        return _split(Source(f"{theirs}{source}.weight", (sum(rows.values()), config.hidden_size)), rows, groups)

    has_fused = any(f"{theirs}{name}.weight" in names for name in fused)
    has_split = any(f"{theirs}{name}.weight" in names for name in split)
    if has_fused and has_split:
        raise InputError(f"{theirs} has both fused ({', '.join(fused)}) and split ({', '.join(split)}) projections")
    if has_fused or (not has_split and config.family == "qwen3_next"):
        projections = [projection("in_proj_qkvz", "qkvz", heads), projection("in_proj_ba", "ba", heads)]
    else:
        projections = [projection(name, name.removeprefix("in_proj_")) for name in split]
    rows = rows_of("qkv", "conv")
    conv = Source(f"{theirs}conv1d.weight", (sum(rows.values()), 1, config.linear_conv_kernel_dim))
    per_head = [
        _split(Source(f"{theirs}{name}", (config.linear_num_value_heads,)), {target: config.linear_num_value_heads})
        for name, target in ((name, f"{ours}{name}.weight") for name in ("A_log", "dt_bias"))
    ]
    return [*projections, _split(conv, rows), *per_head]


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
    router = f"{ours}router.weight"
    recipes = [_split(Source(f"{theirs}gate.weight", shapes[router]), {router: config.num_experts})]
    if has_stacked or (not has_separate and config.family == "qwen3_5_moe"):
        count, width, hidden = shapes[targets["gate_proj"]]
        gate_up, halves = (count, 2 * width, hidden), {targets["gate_proj"]: width, targets["up_proj"]: width}
        down, whole = shapes[targets["down_proj"]], {targets["down_proj"]: hidden}
        recipes += [_split(Source(stacked_names[0], gate_up, e), halves, expert=(e,)) for e in experts]
        recipes += [_split(Source(stacked_names[1], down, e), whole, expert=(e,)) for e in experts]
        return recipes
    for part, target in targets.items():
        shape = shapes[target][1:]
        sources = [Source(f"{theirs}experts.{expert}.{part}.weight", shape) for expert in experts]
        recipes += [_split(source, {target: shape[0]}, expert=(e,)) for e, source in enumerate(sources)]
    return recipes


def _split(source: Source, rows: dict[str, int], groups: int = 1, expert: tuple[int, ...] = ()) -> Recipe:
    """Cuts a source into its targets (name -> rows), or into their places for an `expert`.

    The source holds `groups` groups one after the other, each with its share of every target, in order (Qwen3-Next's
    fused projections: a group a key head). One group: the targets themselves, one after the other.
    """
    return Recipe(
        source,
        tuple(
            Run(target, (*expert, group * (count // groups)), count // groups)
            for group in range(groups)
            for target, count in rows.items()
        ),
    )
