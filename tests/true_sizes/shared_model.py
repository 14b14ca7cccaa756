"""Hugging Face's model of any configuration with random weights, and ours on the same memory.

Both are made on the device at once, so that a model that fills most of a GPU can be compared there.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.model import HybridCausalLM
from nxdi_qwen.modeling.partition import SINGLE
from nxdi_qwen.modeling.weights.layout import derived_buffers, weight_dtype
from nxdi_qwen.modeling.weights.recipes import Run, Source, model_recipes
from tests.nxdi.references import Normal, Uniform, distribution, query_key_pairs

_CLASSES = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
}
_SAME_NAME = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("attention_bias", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
    *("linear_value_head_dim", "linear_conv_kernel_dim", "rms_norm_eps", "max_position_embeddings"),
    "tie_word_embeddings",
)
_MOE = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")


class Origin(NamedTuple):
    """Where a parameter of ours comes from: Hugging Face's parameter, and whether it is a view of that memory."""

    source: str
    shared: bool


class Pair(NamedTuple):
    """Two models with the same weights, stored in `dtype`; `origins` by the name of our parameter."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    reference: PreTrainedModel
    model: HybridCausalLM
    origins: dict[str, Origin]


def build_pair(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> Pair:
    """Both models on `device`. In bfloat16, ours keeps float32 copies of the few tensors it never rounds."""
    device = torch.device(device)
    reference = random_reference(config, dtype, device)
    model, origins = sharing_model(config, reference, dtype)
    return Pair(config, dtype, device, reference, model, origins)


def reference_config(config: ModelConfig) -> Any:
    """Hugging Face's text configuration; the rotary embedding must be the default one."""
    rope = {
        "rope_type": config.rope.rope_type,
        "rope_theta": config.rope.theta,
        "partial_rotary_factor": config.rope.partial_rotary_factor,
    }
    if config.rope.mrope_section is not None:
        rope |= {"mrope_section": list(config.rope.mrope_section), "mrope_interleaved": True}
    fields = {name: getattr(config, name) for name in _SAME_NAME}
    fields |= {"layer_types": list(config.layer_types), "rope_parameters": rope, "pad_token_id": None}
    if any(config.moe_layers):
        fields |= {name: getattr(config, name) for name in _MOE}
    if config.intermediate_size is not None:
        fields["intermediate_size"] = config.intermediate_size
    if config.family == "qwen3_next":
        fields["mlp_only_layers"] = [layer for layer, sparse in enumerate(config.moe_layers) if not sparse]
        fields["norm_topk_prob"] = config.norm_topk_prob
    return getattr(transformers, _CLASSES[config.family][0])(**fields)


def random_reference(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Hugging Face's model in eval mode, with eager attention and experts, filled by the rule of the fixtures: slow
    decay, and layers that each contribute as much as the embedding does.

    Matrices are uniform rather than normal, with the same standard deviation: a CPU draws those five times as fast.
    """
    own = reference_config(config)
    with torch.device("meta"):
        model = getattr(transformers, _CLASSES[config.family][1])._from_config(
            own, attn_implementation="eager", dtype=dtype
        )
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    model.to_empty(device=device).eval().requires_grad_(False)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(own).to(device)
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6])
        match distribution(name, parameter.shape):
            case Normal(mean, std):
                low, high = mean - math.sqrt(3) * std, mean + math.sqrt(3) * std
            case Uniform(low, high):
                pass
        parameter.data.uniform_(low, high, generator=torch.Generator(device).manual_seed(seed))
    data = {name: parameter.data for name, parameter in parameters.items()}
    for query, key in query_key_pairs(data, config.linear_num_key_heads, config.linear_key_head_dim):
        query.mul_(0.6).add_(key, alpha=0.8)
    return model


def sharing_model(
    config: ModelConfig, reference: PreTrainedModel, dtype: torch.dtype
) -> tuple[HybridCausalLM, dict[str, Origin]]:
    """Our model with views of the reference's parameters, after the recipes by which checkpoints are read.

    Only what no view can express is copied: projections that alternate between key heads, and in 16 bit the
    parameters that ours keeps in float32.
    """
    sources = {name: parameter.data for name, parameter in reference.named_parameters()}
    pieces: dict[str, list[tuple[Source, int, Run]]] = {}
    for recipe in model_recipes(config, "model.", sources):
        first = 0
        for run in recipe.runs:
            pieces.setdefault(run.target, []).append((recipe.source, first, run))
            first += run.rows
    weights = {name: _assembled(own, sources).to(weight_dtype(name, dtype)) for name, own in pieces.items()}
    origins = {}
    for name, own in pieces.items():
        source = own[0][0].name
        shared = weights[name].untyped_storage().data_ptr() == sources[source].untyped_storage().data_ptr()
        origins[name] = Origin(source, shared)
    with torch.device("meta"):
        model = HybridCausalLM(config, dtype)
    buffers = {name: buffer.to(reference.device) for name, buffer in derived_buffers(config, SINGLE).items()}
    model.load_state_dict(weights | buffers, strict=True, assign=True)
    return model.requires_grad_(False), origins


def _assembled(pieces: Sequence[tuple[Source, int, Run]], sources: dict[str, Tensor]) -> Tensor:
    """One parameter from its pieces (source, first row in it, place in the parameter): a view where possible."""
    source, first, run = pieces[0]
    tensor = sources[source.name]
    assert tensor.shape == source.shape and all(piece.name == source.name for piece, _, _ in pieces)
    if source.index is not None:  # stacked experts: the same rows of each, in order
        places = [(piece.index, begin, other.start, other.rows) for piece, begin, other in pieces]
        assert places == [(expert, first, (expert, 0), run.rows) for expert in range(tensor.shape[0])]
        return tensor[:, first : first + run.rows]
    if tensor.dim() > 1:
        tensor = tensor.flatten(1)  # a convolution is [channels, 1, kernel]
    parts = [tensor[begin : begin + other.rows] for _, begin, other in pieces]
    ends = [0]
    for _, _, other in pieces:
        assert other.start == (ends[-1],)
        ends.append(ends[-1] + other.rows)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


@contextmanager
def in_float32(model: nn.Module, layers: Iterable[nn.Module]) -> Iterator[None]:
    """Compute in float32 with weights stored in 16 bit: a layer's are widened only while it runs, all others
    throughout. So a model runs in float32 where only its 16-bit weights fit.
    """
    layers = list(layers)
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    outside = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    narrow: dict[nn.Parameter, Tensor] = {}

    def widen(parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            narrow[parameter] = parameter.data
            parameter.data = parameter.data.float()

    def restore(parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.data = narrow.pop(parameter)

    handles: list[Any] = []
    for layer in layers:
        handles.append(layer.register_forward_pre_hook(lambda module, _: widen(module.parameters())))
        handles.append(layer.register_forward_hook(lambda module, _i, _o: restore(module.parameters())))
    widen(outside)
    try:
        yield
    finally:
        restore(outside)
        for handle in handles:
            handle.remove()


def sharing_report(pair: Pair) -> dict[str, Any]:
    """Bytes of both models, and by kind of tensor (`*`: any layer) what ours is a view of and what it copied."""
    kinds: dict[bool, dict[str, str]] = {True: {}, False: {}}
    count = {True: 0, False: 0}
    for name, parameter in pair.model.named_parameters():
        source, shared = pair.origins[name]
        count[shared] += parameter.nbytes
        kinds[shared][_kind(name)] = _kind(source)
    parameters = list(pair.reference.parameters())
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "reference_bytes": sum(parameter.nbytes for parameter in parameters),
        "shared_bytes": count[True],
        "copied_bytes": count[False],
        "shared": kinds[True],
        "copied": kinds[False],
    }


def _kind(name: str) -> str:
    return re.sub(r"layers\.\d+\.", "layers.*.", name)
