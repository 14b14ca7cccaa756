"""The rotary settings of a config.json, in all their spellings."""

from __future__ import annotations

from typing import Any

from nxdi_qwen.modeling.config import ROPE_TYPES, YARN_FIELDS, RopeConfig
from nxdi_qwen.modeling.config_checks import integer, number, shown
from nxdi_qwen.modeling.config_section import ConfigSection
from nxdi_qwen.modeling.errors import InputError

DEFAULT_PARTIAL_ROTARY_FACTOR = 0.25
# Of Qwen3.5, where a configuration names none; as transformers has it.
DEFAULT_MROPE_SECTION = (11, 11, 10)
# Keys of the rotary objects that one export spreads directly in text_config. `type` is too general to be among them.
SPREAD_KEYS = (
    "rope_theta",
    "partial_rotary_factor",
    "rope_type",
    "mrope_section",
    "mrope_interleaved",
    *YARN_FIELDS,
    "truncate",
)


def read_rope(text: ConfigSection, family: str, max_position_embeddings: int) -> tuple[RopeConfig, int, list[str]]:
    """The rotary settings, the usable number of positions, and notes.

    Three places are merged, the later winning key by key: keys spread in the text configuration, `rope_parameters`,
    `rope_scaling`. So a yarn override keeps theta and the mrope sections it does not name.

    Positions: transformers leaves `max_position_embeddings` alone under yarn, vLLM takes `factor` times
    `original_max_position_embeddings`. Here the larger of the two, so that a yarn override is enough to use the longer
    context and a stated limit is never lowered. Without `original_max_position_embeddings` it is taken to be
    `max_position_embeddings`, as in transformers, and the limit stays as stated.

    Raises InputError for a rope type other than default and yarn, a missing theta, and values out of range.
    """
    merged = ConfigSection(_merge(text))
    rope_type = merged.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise InputError(f"rope_type {shown(rope_type)} is not supported; use default or yarn")
    notes: list[str] = []
    fields: dict[str, Any] = {
        "theta": number("rope_theta", merged.require("rope_theta"), above=1),
        "partial_rotary_factor": merged.get("partial_rotary_factor", DEFAULT_PARTIAL_ROTARY_FACTOR),
        "rope_type": rope_type,
    }
    if family != "qwen3_next":
        section = merged.get("mrope_section")
        if section is None and _rotated_pairs(text, fields) == sum(DEFAULT_MROPE_SECTION):
            section = DEFAULT_MROPE_SECTION
        elif section is None:
            notes.append("no mrope_section: positions of height and width are not used")
        fields["mrope_section"] = tuple(section) if isinstance(section, list) else section
        if merged.get("mrope_interleaved", True) is not True:
            notes.append("mrope_interleaved is not true, but the sections of this family are always interleaved")
    positions = max_position_embeddings
    if rope_type == "yarn":
        fields |= _yarn_fields(merged, max_position_embeddings)
        rope = RopeConfig(**fields)
        product = fields["factor"] * fields["original_max_position_embeddings"]
        stretched = int(number("factor times original_max_position_embeddings", product))
        if "original_max_position_embeddings" not in merged.values:
            notes.append(f"yarn without original_max_position_embeddings: {max_position_embeddings} is assumed")
        elif stretched > positions:
            positions = stretched
            notes.append(f"yarn extends max_position_embeddings from {max_position_embeddings} to {positions}")
    else:
        rope = RopeConfig(**fields)
    if unread := merged.unread():
        notes.append(f"ignored rope keys: {', '.join(unread)}")
    return rope, positions, notes


def _rotated_pairs(text: ConfigSection, fields: dict[str, Any]) -> int:
    """Half of the dimensions of a head that are rotated."""
    factor = number("partial_rotary_factor", fields["partial_rotary_factor"])
    return int(integer("head_dim", text.require("head_dim")) * factor) // 2


def _merge(text: ConfigSection) -> dict[str, Any]:
    """The rotary keys of all three places in one dictionary, with `type` spelled `rope_type` and nulls left out."""
    merged = {key: value for key in SPREAD_KEYS if (value := text.get(key)) is not None}
    for name in ("rope_parameters", "rope_scaling"):
        section = text.section(name)
        if section is None:
            continue
        values = dict(section.values)
        legacy_type = values.pop("type", None)
        if legacy_type is not None:
            values.setdefault("rope_type", legacy_type)
        merged |= values
    return merged


def _yarn_fields(merged: ConfigSection, max_position_embeddings: int) -> dict[str, Any]:
    """The fields of RopeConfig that only yarn has; checked as far as the number of positions needs it."""
    original = merged.get("original_max_position_embeddings", max_position_embeddings)
    fields = {
        "factor": number("factor", merged.require("factor"), minimum=1),
        "original_max_position_embeddings": integer("original_max_position_embeddings", original),
    }
    for key in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"):
        fields[key] = merged.get(key)
    return fields | {"truncate": merged.get("truncate", True)}
