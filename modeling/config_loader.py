"""From the config.json and generation_config.json of a checkpoint folder to a ModelConfig, without transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxdi_qwen.modeling.config import FULL_ATTENTION, LINEAR_ATTENTION, SIZES, ModelConfig
from nxdi_qwen.modeling.config_checks import boolean, integer, shown
from nxdi_qwen.modeling.config_rope import read_rope
from nxdi_qwen.modeling.config_section import ConfigSection, read_json_object
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.generation_defaults import GenerationDefaults, read_generation_defaults

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
FAMILY_OF_MODEL_TYPE = {
    "qwen3_next": "qwen3_next",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
}
REQUIRED_KEYS = (*SIZES, "linear_conv_kernel_dim", "rms_norm_eps")
# What each of these keys may say without changing the model; another value would need another model.
REFUSED_UNLESS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "output_gate_type": ("silu", "swish"),
    "attn_output_gate": (True,),
    "use_sliding_window": (False,),
    "mtp_use_dedicated_embeddings": (False,),
}
# Keys that say nothing about the text model's arithmetic and stand in every release.
SILENT_KEYS = frozenset(
    {
        "architectures",
        "attention_dropout",
        "image_token_id",
        "initializer_range",
        "max_window_layers",
        "model_type",
        "mtp_num_hidden_layers",
        "output_router_logits",
        "sliding_window",
        "transformers_version",
        "use_cache",
        "video_token_id",
        "vision_config",
        "vision_end_token_id",
        "vision_start_token_id",
    }
)
# Keys of qwen3_next that qwen3_5_moe carries and ignores: worth a note only where they ask for something else.
SILENT_VALUES: dict[str, Any] = {"mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True}
SILENT_GENERATION_KEYS = frozenset({"transformers_version", "_from_model_config", "use_cache"})
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class LoadedConfig:
    """What a checkpoint folder says about its model.

    `notes` are sentences for the user (ignored keys, contradictions and how they were settled). `quantization` is
    `quantization_config` as it stands in the file (or MLX's `quantization`), None without one; the weight code judges
    it.
    """

    config: ModelConfig
    generation: GenerationDefaults
    notes: tuple[str, ...]
    quantization: dict[str, Any] | None


def load_config(folder: str | Path) -> LoadedConfig:
    """Read `config.json` and, where there is one, `generation_config.json` of a local checkpoint folder.

    `tie_word_embeddings` is True if the outer or the inner flag says so; a `lm_head.weight` among the tensors overrules
    it. Without a dtype, bfloat16 is assumed, the dtype of every release. End tokens are the union of both files.

    Raises InputError for a missing folder (with the download command for a hub id) or file, malformed JSON, an unknown
    model type, and missing, mistyped, out-of-range or model-changing values, each named with its file.
    """
    path = _checkpoint_folder(folder)
    config_path, generation_path = path / CONFIG_FILE, path / GENERATION_FILE
    if not config_path.is_file():
        raise InputError(f"no {CONFIG_FILE} in {path}; give the folder of a Hugging Face checkpoint")
    outer = ConfigSection(read_json_object(config_path))
    generation_section = ConfigSection(read_json_object(generation_path) if generation_path.is_file() else {})
    with _naming(generation_path):
        generation = read_generation_defaults(generation_section)
        tokens = _Tokens.read(generation_section)
    with _naming(config_path):
        config, notes, quantization = _read_config(outer, tokens)
    if unread := [key for key in generation_section.unread() if key not in SILENT_GENERATION_KEYS]:
        notes.append(f"ignored generation_config.json keys: {', '.join(unread)}")
    return LoadedConfig(config, generation, tuple(notes), quantization)


def parse_config(values: Mapping[str, Any]) -> ModelConfig:
    """The model configuration from the content of a config.json alone, with `load_config`'s rules and errors."""
    return _read_config(ConfigSection(dict(values)), _Tokens.read(ConfigSection({})))[0]


def _checkpoint_folder(folder: str | Path) -> Path:
    path = Path(folder)
    if path.is_dir():
        return path
    if path.exists():
        raise InputError(f"{path} is a file; give the folder that holds config.json")
    if HUB_ID.fullmatch(str(folder)) and not path.parent.is_dir():
        command = f"hf download {folder} --local-dir {path.name}"
        raise InputError(f"no folder {folder}; if it is a hub id, download it first: {command}")
    raise InputError(f"no folder {path}; give the folder of a Hugging Face checkpoint")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the file's path before the message of an InputError."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


@dataclass(frozen=True)
class _Tokens:
    """The special tokens that one object names."""

    eos: tuple[int, ...]
    pad: int | None
    bos: int | None

    @classmethod
    def read(cls, section: ConfigSection) -> _Tokens:
        stated = section.get("eos_token_id", [])
        eos = stated if isinstance(stated, list) else [stated]
        pad, bos = section.get("pad_token_id"), section.get("bos_token_id")
        return cls(
            eos=tuple(integer("eos_token_id", token, minimum=0) for token in eos),
            pad=None if pad is None else integer("pad_token_id", pad, minimum=0),
            bos=None if bos is None else integer("bos_token_id", bos, minimum=0),
        )


def _read_config(outer: ConfigSection, generated: _Tokens) -> tuple[ModelConfig, list[str], dict[str, Any] | None]:
    """The model configuration, notes, and the quantisation object, from the object in config.json."""
    nested = outer.section("text_config")
    text = outer if nested is None else nested
    places = (text,) if nested is None else (text, outer)
    family = _family(outer, text)
    for place in places:
        _refuse_other_models(place)

    layers = integer("num_hidden_layers", text.require("num_hidden_layers"))
    layer_types, notes = _layer_types(text, layers)
    stated_positions = integer("max_position_embeddings", text.require("max_position_embeddings"))
    rope, positions, rope_notes = read_rope(text, family, stated_positions)
    dtype, dtype_notes = _dtype(places)
    tied, tie_notes = _tied(places)
    notes += rope_notes + dtype_notes + tie_notes
    tokens = [*(_Tokens.read(place) for place in places), generated]

    config = ModelConfig(
        family=family,
        layer_types=layer_types,
        **{key: text.require(key) for key in REQUIRED_KEYS},
        **_mlp_fields(text, family, layers),
        attention_bias=text.get("attention_bias", False),
        max_position_embeddings=positions,
        rope=rope,
        dtype=dtype,
        tie_word_embeddings=tied,
        eos_token_ids=tuple(dict.fromkeys(token for place in tokens for token in place.eos)),
        pad_token_id=next((place.pad for place in tokens if place.pad is not None), None),
        bos_token_id=next((place.bos for place in tokens if place.bos is not None), None),
    )
    quantization = _first_object(places, "quantization_config", "quantization")
    if ignored := sorted({key for place in places for key in _reportable(place)}):
        notes.append(f"ignored configuration keys: {', '.join(ignored)}")
    return config, notes, quantization


def _family(outer: ConfigSection, text: ConfigSection) -> str:
    """The family that `model_type` names. `architectures` can be wrong in published files and is not consulted."""
    outer_type = outer.get("model_type")
    if outer_type is None:
        outer_type = text.require("model_type")
    inner_type = text.get("model_type", outer_type)
    for model_type in (outer_type, inner_type):
        if not isinstance(model_type, str) or model_type not in FAMILY_OF_MODEL_TYPE:
            accepted = ", ".join(FAMILY_OF_MODEL_TYPE)
            raise InputError(f"model_type {shown(model_type)} is not supported; accepted are {accepted}")
    family = FAMILY_OF_MODEL_TYPE[outer_type]
    if FAMILY_OF_MODEL_TYPE[inner_type] != family:
        raise InputError(f"model_type {outer_type} contradicts text_config.model_type {inner_type}; make them agree")
    return family


def _refuse_other_models(place: ConfigSection) -> None:
    for key, accepted in REFUSED_UNLESS.items():
        value = place.get(key)
        if value is not None and not any(type(value) is type(one) and value == one for one in accepted):
            choices = " or ".join(str(one).lower() for one in accepted)
            raise InputError(f"{key} {shown(value)} is another model than this one; supported is {choices}")


def _layer_types(text: ConfigSection, layers: int) -> tuple[tuple[str, ...], list[str]]:
    """`layer_types`, or without them every `full_attention_interval`-th layer full attention; and notes."""
    interval = integer("full_attention_interval", text.get("full_attention_interval", 4))
    stated = text.get("layer_types")
    if stated is not None:
        if not isinstance(stated, list):
            raise InputError(f"layer_types must be a list with one entry per layer, got {shown(stated)}")
        if len(stated) != layers:
            raise InputError(
                f"layer_types has {len(stated)} entries, but num_hidden_layers is {layers}; make them agree"
            )
    derived = [FULL_ATTENTION if index % interval == interval - 1 else LINEAR_ATTENTION for index in range(layers)]
    if stated is None:
        return tuple(derived), []
    if "full_attention_interval" in text.values and stated != derived:
        return tuple(stated), [f"layer_types win over the contradicting full_attention_interval {interval}"]
    return tuple(stated), []


def _mlp_fields(text: ConfigSection, family: str, layers: int) -> dict[str, Any]:
    """The fields of ModelConfig about dense and MoE layers; those that the model does not use are 0 or None."""
    if family == "qwen3_next":
        experts = integer("num_experts", text.require("num_experts"), minimum=0)
        step = integer("decoder_sparse_step", text.get("decoder_sparse_step", 1))
        dense = text.get("mlp_only_layers", [])
        if not isinstance(dense, list) or any(type(index) is not int for index in dense):
            raise InputError(f"mlp_only_layers must be a list of layer numbers, got {shown(dense)}")
        moe_layers = tuple(i not in dense and experts > 0 and (i + 1) % step == 0 for i in range(layers))
    else:
        moe_layers = (family == "qwen3_5_moe",) * layers
    # Published files state sizes that no layer uses, such as the intermediate_size of Qwen3-Next.
    unused: dict[str, Any] = {"intermediate_size": None, "num_experts": 0, "num_experts_per_tok": 0}
    unused |= {"moe_intermediate_size": None, "shared_expert_intermediate_size": None}
    is_used = {key: any(moe_layers) for key in unused} | {"intermediate_size": not all(moe_layers)}
    fields = {}
    for key, value in unused.items():
        text.get(key)  # counts as read, so that an unused size is not reported
        fields[key] = text.require(key) if is_used[key] else value
    # qwen3_5_moe always renormalises; only qwen3_next has the choice.
    fields["norm_topk_prob"] = text.get("norm_topk_prob", True) if family == "qwen3_next" else True
    return fields | {"moe_layers": moe_layers}


def _dtype(places: tuple[ConfigSection, ...]) -> tuple[str, list[str]]:
    """The checkpoint's dtype, inner before outer and `dtype` before `torch_dtype`; and notes."""
    found = [value for place in places for key in ("dtype", "torch_dtype") if (value := place.get(key)) is not None]
    names = [value.removeprefix("torch.") if isinstance(value, str) else value for value in found]
    if not names:
        return "bfloat16", ["no dtype in config.json: bfloat16 is assumed"]
    if any(name != names[0] for name in names):
        return names[0], [f"dtype {shown(names[0])} wins over the contradicting {shown(names[-1])}"]
    return names[0], []


def _tied(places: tuple[ConfigSection, ...]) -> tuple[bool, list[str]]:
    """Whether any `tie_word_embeddings` says that the head is the embedding; and notes."""
    key = "tie_word_embeddings"
    flags = [boolean(key, value) for place in places if (value := place.get(key)) is not None]
    if len(set(flags)) > 1:
        return True, [f"{key} differs inside and outside text_config: tied, unless there is an lm_head.weight"]
    return any(flags), []


def _first_object(places: tuple[ConfigSection, ...], *keys: str) -> dict[str, Any] | None:
    """The first of the objects under `keys`, outer places first, as it stands; every one of them counts as read."""
    found = [place.values[key] for place in reversed(places) for key in keys if place.section(key) is not None]
    return found[0] if found else None


def _reportable(place: ConfigSection) -> Iterator[str]:
    for key in place.unread():
        is_silent = key in SILENT_VALUES and place.values[key] == SILENT_VALUES[key]
        if key not in SILENT_KEYS and not is_silent:
            yield key
