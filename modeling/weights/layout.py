"""This model's parameters: their names, shapes, dtypes and order, from the configuration alone."""

from __future__ import annotations

import torch

from nxdi_qwen.modeling.config import LINEAR_ATTENTION, ModelConfig
from nxdi_qwen.modeling.model import HybridCausalLM
from nxdi_qwen.modeling.parallel import parameter_cuts
from nxdi_qwen.modeling.partition import SINGLE, Cut, Parallel, local_shape
from nxdi_qwen.modeling.rope_frequencies import rope_inv_freq

Shape = tuple[int, ...]
Specs = dict[str, tuple[Shape, torch.dtype]]

ROPE = "rope.inv_freq"
RANK = "rank"
# Buffers that are computed, not read from a checkpoint.
DERIVED = (RANK, ROPE)
# The decay is exponentiated twice, and some releases keep these in float32: rounding would lose what is there.
_ALWAYS_FLOAT32 = (ROPE, ".linear_attn.A_log.weight", ".linear_attn.dt_bias.weight", ".linear_attn.norm.weight")


def weight_specs(config: ModelConfig, dtype: torch.dtype, parallel: Parallel = SINGLE) -> Specs:
    """name -> (shape, dtype) of every parameter and derived buffer of a rank, in the order they are streamed.

    `config.tie_word_embeddings` must be resolved (`plan_weights(...).config`): it decides whether there is a
    `lm_head.weight`.
    """
    cuts = weight_cuts(config, parallel)
    return {
        name: (local_shape(shape, cuts[name], parallel), weight_dtype(name, dtype))
        for name, shape in weight_shapes(config).items()
    }


def weight_cuts(config: ModelConfig, parallel: Parallel) -> dict[str, tuple[Cut, ...]]:
    """name -> how it is cut, as the model's own layers say."""
    with torch.device("meta"):
        model = HybridCausalLM(config, torch.bfloat16, parallel)
    cuts = {name: parameter_cuts(parameter) for name, parameter in model.named_parameters()}
    return cuts | {name: () for name, _ in model.named_buffers()}


def weight_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a parameter of a model in `dtype` is kept."""
    if name == RANK:
        return torch.int64
    return torch.float32 if name.endswith(_ALWAYS_FLOAT32) else dtype


def derived_buffers(config: ModelConfig, parallel: Parallel) -> dict[str, torch.Tensor]:
    """The buffers of a rank that no checkpoint holds, by name."""
    return {RANK: torch.tensor([parallel.rank]), ROPE: rope_inv_freq(config)}


def weight_shapes(config: ModelConfig) -> dict[str, Shape]:
    """name -> shape, in the order the parameters are streamed."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {
        RANK: (1,),
        "embed_tokens.weight": (config.vocab_size, hidden),
        ROPE: (config.rotary_dim // 2,),
    }
    for layer, layer_type in enumerate(config.layer_types):
        prefix = f"layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        mixer = _gdn_shapes if layer_type == LINEAR_ATTENTION else _attention_shapes
        mlp = _moe_shapes if config.moe_layers[layer] else _dense_shapes
        shapes |= {prefix + name: shape for name, shape in mixer(config).items()}
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes |= {prefix + name: shape for name, shape in mlp(config).items()}
    shapes["norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _gdn_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, heads = config.hidden_size, config.linear_num_value_heads
    widths = {"q": config.key_dim, "k": config.key_dim, "v": config.value_dim}
    projections = widths | {"z": config.value_dim, "b": heads, "a": heads}
    return {
        **{f"linear_attn.{part}_proj.weight": (rows, hidden) for part, rows in projections.items()},
        **{f"linear_attn.{part}_conv.weight": (rows, config.linear_conv_kernel_dim) for part, rows in widths.items()},
        "linear_attn.A_log.weight": (heads,),
        "linear_attn.dt_bias.weight": (heads,),
        "linear_attn.norm.weight": (config.linear_value_head_dim,),
        "linear_attn.out_proj.weight": (hidden, config.value_dim),
    }


def _attention_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
    key_width = config.num_key_value_heads * config.head_dim
    shapes: dict[str, Shape] = {}
    for part, shape in {
        "q": (2 * width, hidden),  # per head: the query, then its output gate
        "k": (key_width, hidden),
        "v": (key_width, hidden),
        "o": (hidden, width),
    }.items():
        shapes[f"self_attn.{part}_proj.weight"] = shape
        if config.attention_bias:
            shapes[f"self_attn.{part}_proj.bias"] = shape[:1]
    shapes["self_attn.q_norm.weight"] = (config.head_dim,)
    shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def _dense_shapes(config: ModelConfig) -> dict[str, Shape]:
    assert config.intermediate_size is not None
    return _swiglu_shapes("mlp.", config.hidden_size, config.intermediate_size)


def _moe_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, experts, width = config.hidden_size, config.num_experts, config.moe_intermediate_size
    assert width is not None and config.shared_expert_intermediate_size is not None
    return {
        "mlp.router.weight": (experts, hidden),
        "mlp.experts.gate_proj": (experts, width, hidden),
        "mlp.experts.up_proj": (experts, width, hidden),
        "mlp.experts.down_proj": (experts, hidden, width),
        **_swiglu_shapes("mlp.shared_expert.", hidden, config.shared_expert_intermediate_size),
        "mlp.shared_expert_gate.weight": (1, hidden),
    }


def _swiglu_shapes(prefix: str, hidden: int, width: int) -> dict[str, Shape]:
    return {
        f"{prefix}gate_proj.weight": (width, hidden),
        f"{prefix}up_proj.weight": (width, hidden),
        f"{prefix}down_proj.weight": (hidden, width),
    }
