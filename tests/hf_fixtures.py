"""Tiny Hugging Face models of the three families: the reference that the tests compare with, and their checkpoints.

The shapes and the parameters are chosen so that a wrong port cannot pass: at least two key heads, two or three
value heads per key head, at least two query heads per KV head, dk != dv, conv kernels 3, 4 and 5, irregular layer
types, dense layers among MoE, slow decay (mean |g| < 0.05, see `measured_decay`), random norms, and layers that
contribute nearly as much as the residual stream. All models are float32, in eval mode, with eager attention.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from tests.byte_tokenizer import IM_END_ID, PAD_ID, write_tokenizer
from tests.nxdi.references import Normal, Uniform, distribution, query_key_pairs


@dataclass(frozen=True)
class Spec:
    """One fixture: the family (the outer model type) and what differs from `COMMON` in its text configuration."""

    family: str
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def moe(self) -> bool:
        return self.family != "qwen3_5"


COMMON: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "eos_token_id": PAD_ID,
}
DENSE = {"intermediate_size": 104}
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}


def _rope(theta: float, mrope_section: list[int] | None = None) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.25}
    return rope if mrope_section is None else rope | {"mrope_section": mrope_section, "mrope_interleaved": True}


def _layers(pattern: str) -> list[str]:
    return [{"L": "linear_attention", "F": "full_attention"}[letter] for letter in pattern]


_NEXT, _MROPE = {"rope_parameters": _rope(1e4)}, {"rope_parameters": _rope(1e4, [2, 1, 1])}

FIXTURES: dict[str, Spec] = {
    "qwen3_next": Spec("qwen3_next", _NEXT | MOE),
    # Dense layers 0, 2, 3, 4; MoE layers 1 and 5, without renormalisation.
    "qwen3_next_mixed": Spec(
        "qwen3_next",
        _NEXT
        | DENSE
        | MOE
        | {
            "num_hidden_layers": 6,
            "layer_types": _layers("FLLFLL"),
            "mlp_only_layers": [3],
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
            "linear_num_value_heads": 6,
            "linear_value_head_dim": 20,
            "linear_conv_kernel_dim": 3,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5": Spec("qwen3_5", _MROPE | DENSE | {"num_attention_heads": 6, "linear_num_value_heads": 6}),
    "qwen3_5_tied": Spec(
        "qwen3_5",
        _MROPE
        | DENSE
        | {
            "num_hidden_layers": 5,
            "layer_types": _layers("LFLLF"),
            "linear_key_head_dim": 24,
            "linear_conv_kernel_dim": 5,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_bias": Spec("qwen3_5", _MROPE | DENSE | {"attention_bias": True, "layer_types": _layers("LFLF")}),
    # The head_dim and the mrope sections of the real models.
    "qwen3_5_wide": Spec(
        "qwen3_5",
        DENSE
        | {
            "rope_parameters": _rope(1e7, [11, 11, 10]),
            "hidden_size": 96,
            "head_dim": 256,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
    ),
    "qwen3_5_moe": Spec("qwen3_5_moe", _MROPE | MOE | {"linear_num_value_heads": 6}),
    "qwen3_5_moe_tied": Spec(
        "qwen3_5_moe",
        _MROPE
        | MOE
        | {
            "num_hidden_layers": 5,
            "layer_types": _layers("LLFLF"),
            "num_experts": 6,
            "linear_value_head_dim": 20,
            "tie_word_embeddings": True,
        },
    ),
}

# family: (text configuration, text model, outer configuration, vision configuration, multimodal model)
_CLASSES: dict[str, tuple[str, str, str | None, str | None, str | None]] = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", None, None, None),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        "Qwen3_5Config",
        "Qwen3_5VisionConfig",
        "Qwen3_5ForConditionalGeneration",
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeConfig",
        "Qwen3_5MoeVisionConfig",
        "Qwen3_5MoeForConditionalGeneration",
    ),
}


def _class(name: str) -> Any:
    for module in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
        if hasattr(getattr(transformers.models, module), name):
            return getattr(getattr(transformers.models, module), name)
    raise KeyError(name)


def _build(model_class: Any, config: Any) -> PreTrainedModel:
    """A model in eval mode with the attention and the experts computed by their plain torch forms."""
    model = model_class._from_config(config, attn_implementation="eager", dtype=torch.float32)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model.eval().requires_grad_(False)


@functools.cache
def hf_model(name: str, seed: int = 0) -> PreTrainedModel:
    """The fixture `name` of `FIXTURES` as a causal language model. Cached: copy it before changing a parameter."""
    return model_of(FIXTURES[name], seed)


def model_of(spec: Spec, seed: int = 0) -> PreTrainedModel:
    """A causal language model of `spec` with random parameters."""
    text_config, text_model, *_ = _CLASSES[spec.family]
    model = _build(_class(text_model), _class(text_config)(**(COMMON | spec.config)))
    randomise(model, seed)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.7, top_k=20, top_p=0.8, eos_token_id=[IM_END_ID, PAD_ID], pad_token_id=PAD_ID
    )
    return model


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Fill every parameter by the rule of `tests.nxdi.references`."""
    generator = torch.Generator().manual_seed(seed)
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    for name, parameter in parameters.items():
        match distribution(name, parameter.shape):
            case Normal(mean, std):
                value = torch.randn(parameter.shape, generator=generator) * std + mean
            case Uniform(low, high):
                value = torch.rand(parameter.shape, generator=generator) * (high - low) + low
        parameter.copy_(value)
    config = model.config.get_text_config()
    for query, key in query_key_pairs(parameters, config.linear_num_key_heads, config.linear_key_head_dim):
        query.mul_(0.6).add_(key, alpha=0.8)


def prompt_ids(model: PreTrainedModel, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids [length], int64; with `seed` they are always the same."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(0, model.config.get_text_config().vocab_size, (length,), generator=generator)


@torch.no_grad()
def reference_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Logits [T, V] float32 of one pass over one unpadded row; `ids` is [T] int64."""
    return model(input_ids=ids[None], use_cache=False).logits[0].float()


@dataclass(frozen=True)
class ReferenceSteps:
    """Logits [1 + len(continuation), V] float32 after the prompt and after each continued token, and, by layer index,
    the final states of the GDN layers: recurrent [Hv, dk, dv], conv [2K + V, kernel] (a port needs kernel - 1)."""

    logits: torch.Tensor
    recurrent: dict[int, torch.Tensor]
    conv: dict[int, torch.Tensor]


@torch.no_grad()
def reference_steps(model: PreTrainedModel, prompt: torch.Tensor, continuation: torch.Tensor) -> ReferenceSteps:
    """Prefill `prompt` [T] with a cache, then feed `continuation` [N] token by token (teacher-forced)."""
    config = model.config.get_text_config()
    cache = DynamicCache(config=config)
    logits = [model(input_ids=prompt[None], cache=cache, use_cache=True).logits[0, -1]]
    for token in continuation:
        logits.append(model(input_ids=token.view(1, 1), cache=cache, use_cache=True).logits[0, -1])
    linear = [layer for layer, kind in enumerate(config.layer_types) if kind == "linear_attention"]
    return ReferenceSteps(
        logits=torch.stack(logits).float(),
        recurrent={layer: cache.get_recurrent_state(layer)[0].clone() for layer in linear},
        conv={layer: cache.get_conv_state(layer)[0].clone() for layer in linear},
    )


@torch.no_grad()
def measured_decay(model: PreTrainedModel, ids: torch.Tensor) -> dict[int, torch.Tensor]:
    """The log decay g [T, Hv] float32 of each GDN layer, by layer index, on the prompt `ids` [T]."""
    decays: dict[int, torch.Tensor] = {}

    def record(layer: int, mixer: Any, output: torch.Tensor) -> None:
        a = output[0]
        if hasattr(mixer, "in_proj_ba"):  # grouped by key head: r times b, then r times a
            a = a.view(len(ids), mixer.num_k_heads, 2, -1)[:, :, 1].reshape(len(ids), -1)
        decays[layer] = -mixer.A_log.exp() * torch.nn.functional.softplus(a + mixer.dt_bias)

    handles = []
    for index, layer in enumerate(model.model.layers):
        if mixer := getattr(layer, "linear_attn", None):
            projection = mixer.in_proj_ba if hasattr(mixer, "in_proj_ba") else mixer.in_proj_a
            handles.append(projection.register_forward_hook(lambda _m, _i, out, n=index, x=mixer: record(n, x, out)))
    reference_logits(model, ids)
    for handle in handles:
        handle.remove()
    return decays


def nested_model(model: PreTrainedModel) -> PreTrainedModel:
    """The multimodal model (a tiny vision tower beside the language model) with the parameters of a text model."""
    family = model.config.model_type.removesuffix("_text")
    _, _, outer_config, vision_config, outer_model = _CLASSES[family]
    if outer_config is None:
        raise ValueError(f"{family} has no multimodal form")
    text = model.config
    vision = _class(vision_config)(
        depth=1,
        hidden_size=16,
        intermediate_size=24,
        num_heads=2,
        patch_size=4,
        out_hidden_size=text.hidden_size,
        num_position_embeddings=16,
    )
    image_ids = {f"{name}_token_id": text.vocab_size - 1 - n for n, name in enumerate(("image", "video"))}
    config = _class(outer_config)(
        text_config=text.to_dict(),
        vision_config=vision.to_dict(),
        tie_word_embeddings=text.tie_word_embeddings,
        **image_ids,
    )
    nested = _build(_class(outer_model), config).to(model.dtype)
    nested.model.language_model.load_state_dict(model.model.state_dict())
    nested.lm_head.load_state_dict(model.lm_head.state_dict())
    nested.generation_config = model.generation_config
    return nested


def save_checkpoint(
    model: PreTrainedModel,
    folder: Path,
    *,
    nested: bool = False,
    stacked: bool = False,
    shards: int = 1,
    tokenizer: bool = False,
) -> Path:
    """Write `config.json`, `generation_config.json` and safetensors as Hugging Face's own classes save them.

    `nested`: the multimodal class writes it (Qwen3.5 only). `stacked`: experts restacked as the bf16 releases of
    Qwen3.5 have them (HF saves a model that was built from a configuration expert by expert). `shards` > 1: that many
    files and an index. Returns `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (nested_model(model) if nested else model).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    if stacked:
        tensors = stack_experts(tensors)
    (folder / "model.safetensors").unlink()
    write_tensors(tensors, folder, shards)
    if tokenizer:
        write_tokenizer(folder)
    return folder


def stack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Per-expert tensors to `experts.gate_up_proj` [E, 2I, H] (gate first) and `experts.down_proj` [E, H, I]."""
    prefixes = {name.split(".experts.")[0] + ".experts." for name in tensors if ".experts." in name}
    result = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for prefix in sorted(prefixes):
        count = 1 + max(int(name[len(prefix) :].split(".")[0]) for name in tensors if name.startswith(prefix))
        gate, up, down = (
            torch.stack([tensors[f"{prefix}{expert}.{part}_proj.weight"] for expert in range(count)])
            for part in ("gate", "up", "down")
        )
        result[f"{prefix}gate_up_proj"] = torch.cat((gate, up), dim=1)
        result[f"{prefix}down_proj"] = down
    return result


def write_tensors(tensors: dict[str, torch.Tensor], folder: Path, shards: int = 1) -> None:
    """Write `model.safetensors`, or `shards` files in turn with `model.safetensors.index.json`."""
    tensors = {name: tensor.contiguous() for name, tensor in sorted(tensors.items())}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file_name))
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
