"""The configuration of a model: one validated dataclass for every checkpoint of the family."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nxdi_qwen.modeling.config_checks import boolean, integer, multiple_of, number, one_of, shown
from nxdi_qwen.modeling.errors import InputError

LINEAR_ATTENTION = "linear_attention"
FULL_ATTENTION = "full_attention"

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
DTYPES = ("bfloat16", "float16", "float32")
# Every checkpoint must state these; each is a whole number above zero.
SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)
ROPE_TYPES = ("default", "yarn")
YARN_FIELDS = (
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: `rope_type` "default" or "yarn" (the yarn fields are None for "default").

    For "yarn", `factor` and `original_max_position_embeddings` are needed; the others may be None, which means the
    values that `rope_frequencies` names. `mrope_section` counts the rotated frequencies that belong to time, height and
    width, interleaved; None for a text-only rotary embedding.

    Raises InputError for a value out of range, named by its key in config.json.
    """

    theta: float
    partial_rotary_factor: float
    rope_type: str = "default"
    mrope_section: tuple[int, ...] | None = None
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        number("rope_theta", self.theta, above=1)
        if number("partial_rotary_factor", self.partial_rotary_factor, above=0) > 1:
            raise InputError(f"partial_rotary_factor must be at most 1, got {self.partial_rotary_factor}")
        one_of("rope_type", self.rope_type, ROPE_TYPES)
        boolean("truncate", self.truncate)
        if self.mrope_section is not None:
            _check_mrope_section(self.mrope_section)
        if self.rope_type == "yarn":
            self._check_yarn()
            return
        for name in YARN_FIELDS:
            if getattr(self, name) is not None:
                raise InputError(f"{name} belongs to rope_type yarn; rope_type default does not use it")

    def _check_yarn(self) -> None:
        number("factor", self.factor, minimum=1)
        integer("original_max_position_embeddings", self.original_max_position_embeddings)
        for name in ("beta_fast", "beta_slow", "attention_factor"):
            if (value := getattr(self, name)) is not None:
                number(name, value, above=0)
        for name in ("mscale", "mscale_all_dim"):
            if (value := getattr(self, name)) is not None:
                number(name, value, minimum=0)


def _check_mrope_section(section: Any) -> None:
    if not isinstance(section, tuple) or len(section) != 3:
        raise InputError(f"mrope_section must hold three integers (time, height, width), got {shown(section)}")
    for count in section:
        integer("each entry of mrope_section", count, minimum=0)


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides the arithmetic and the shapes of one text model.

    Raises InputError for values that cannot be a model of the family: the message names the key as config.json spells
    it, the value, and what it should be.
    """

    family: str  # "qwen3_next", "qwen3_5" or "qwen3_5_moe"
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]
    moe_layers: tuple[bool, ...]  # per layer: sparse MoE (True) or dense SwiGLU (False)
    intermediate_size: int | None  # None where no layer is dense
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attention_bias: bool
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    num_experts: int  # 0 for a dense model
    num_experts_per_tok: int
    moe_intermediate_size: int | None
    shared_expert_intermediate_size: int | None
    norm_topk_prob: bool
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    dtype: str  # of the checkpoint: "bfloat16", "float16" or "float32"
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    bos_token_id: int | None

    def __post_init__(self) -> None:
        one_of("family", self.family, FAMILIES)
        one_of("dtype", self.dtype, DTYPES)
        for name in (*SIZES, "max_position_embeddings"):
            integer(name, getattr(self, name))
        # A kernel of 1 would leave the convolution without a state.
        integer("linear_conv_kernel_dim", self.linear_conv_kernel_dim, minimum=2)
        for name in ("attention_bias", "norm_topk_prob", "tie_word_embeddings"):
            boolean(name, getattr(self, name))
        number("rms_norm_eps", self.rms_norm_eps, above=0)
        multiple_of("num_attention_heads", self.num_attention_heads, "num_key_value_heads", self.num_key_value_heads)
        multiple_of(
            "linear_num_value_heads", self.linear_num_value_heads, "linear_num_key_heads", self.linear_num_key_heads
        )
        self._check_rope()
        self._check_layers()
        self._check_mlp()
        self._check_tokens()

    def _check_rope(self) -> None:
        if not isinstance(self.rope, RopeConfig):
            raise InputError(f"rope must be an object of rotary settings, got {shown(self.rope)}")
        product = f"head_dim {self.head_dim} times partial_rotary_factor {self.rope.partial_rotary_factor}"
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise InputError(f"{product} must be an even number of rotated dimensions, got {self.rotary_dim}")
        section = self.rope.mrope_section
        if section is not None and sum(section) != self.rotary_dim // 2:
            raise InputError(
                f"mrope_section {list(section)} must sum to {self.rotary_dim // 2}, half of {product}; "
                f"it sums to {sum(section)}"
            )

    def _check_layers(self) -> None:
        for name in ("layer_types", "moe_layers"):
            values = getattr(self, name)
            if not isinstance(values, tuple):
                raise InputError(f"{name} must be a list with one entry per layer, got {shown(values)}")
            if len(values) != self.num_hidden_layers:
                raise InputError(
                    f"{name} must have one entry per layer: {len(values)} entries, "
                    f"but num_hidden_layers is {self.num_hidden_layers}"
                )
        for index, layer_type in enumerate(self.layer_types):
            one_of(f"layer_types[{index}]", layer_type, (LINEAR_ATTENTION, FULL_ATTENTION))
        for index, is_moe in enumerate(self.moe_layers):
            boolean(f"moe_layers[{index}]", is_moe)
        if self.family == "qwen3_5" and any(self.moe_layers):
            raise InputError("moe_layers must be false for every layer of a qwen3_5 model")
        if self.family == "qwen3_5_moe" and not all(self.moe_layers):
            raise InputError("moe_layers must be true for every layer of a qwen3_5_moe model")

    def _check_mlp(self) -> None:
        if not all(self.moe_layers) or self.intermediate_size is not None:
            integer("intermediate_size", self.intermediate_size)
        least = int(any(self.moe_layers))
        integer("num_experts", self.num_experts, minimum=least)
        integer("num_experts_per_tok", self.num_experts_per_tok, minimum=least)
        for name in ("moe_intermediate_size", "shared_expert_intermediate_size"):
            if least or getattr(self, name) is not None:
                integer(name, getattr(self, name))
        if self.num_experts_per_tok > self.num_experts:
            raise InputError(
                f"num_experts_per_tok must be at most num_experts, got {self.num_experts_per_tok} of {self.num_experts}"
            )

    def _check_tokens(self) -> None:
        if not isinstance(self.eos_token_ids, tuple):
            raise InputError(f"eos_token_id must be an integer or a list of them, got {shown(self.eos_token_ids)}")
        for token in self.eos_token_ids:
            integer("eos_token_id", token, minimum=0)
        for name in ("pad_token_id", "bos_token_id"):
            if (token := getattr(self, name)) is not None:
                integer(name, token, minimum=0)

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated, an even number."""
        return int(self.head_dim * self.rope.partial_rotary_factor)

    @property
    def key_dim(self) -> int:
        """Width of all GDN key heads together: Hk * dk."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Width of all GDN value heads together: Hv * dv."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: q, k and v."""
        return 2 * self.key_dim + self.value_dim

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; `from_dict` is its inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """The configuration that `to_dict` wrote, also after a journey through JSON (lists become tuples).

        Raises InputError for an unknown or missing key and for every value that the constructor refuses.
        """
        fields = _exact_fields(cls, values, "the model configuration")
        fields["rope"] = RopeConfig(**_exact_fields(RopeConfig, fields["rope"], "rope"))
        return cls(**fields)


def _exact_fields(cls: type, values: Any, where: str) -> dict[str, Any]:
    """The fields of `cls` from a JSON object that must have exactly these keys; lists become tuples."""
    if not isinstance(values, Mapping):
        raise InputError(f"{where} must be an object, got {shown(values)}")
    expected = {field.name for field in dataclasses.fields(cls)}
    if missing := sorted(expected - values.keys()):
        raise InputError(f"{where} lacks {', '.join(missing)}; write it with this version's to_dict")
    if unknown := sorted(values.keys() - expected):
        raise InputError(f"{where} has unknown keys: {', '.join(unknown)}; remove them")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
