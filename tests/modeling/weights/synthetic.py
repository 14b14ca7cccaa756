"""Small checkpoints whose every element is different, with names and shapes written out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nxdi_qwen.modeling.config import ModelConfig, RopeConfig
from nxdi_qwen.modeling.weights import Checkpoint, WeightPlan, plan_weights, stream_weights
from tests.hf_fixtures import write_tensors

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "layer_types": ("linear_attention", "full_attention"),
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "attention_bias": False,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 3,
    "linear_conv_kernel_dim": 4,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 5,
    "shared_expert_intermediate_size": 7,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "rope": RopeConfig(theta=1e4, partial_rotary_factor=0.5),
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "eos_token_ids": (1,),
    "pad_token_id": None,
    "bos_token_id": None,
}


def make_config(family: str, **changes: Any) -> ModelConfig:
    layers = changes.get("num_hidden_layers", SIZES["num_hidden_layers"])
    return ModelConfig(**{"family": family, "moe_layers": (family != "qwen3_5",) * layers} | SIZES | changes)


def checkpoint_shapes(
    config: ModelConfig, prefix: str = "model.", *, fused: bool = False, stacked: bool = False
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint, as the releases have them."""
    h, e = config.hidden_size, config.num_experts
    k, v = config.key_dim, config.value_dim
    heads, nq, nkv, d = config.linear_num_value_heads, config.num_attention_heads, config.num_key_value_heads, 8
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}embed_tokens.weight": (config.vocab_size, h),
        f"{prefix}norm.weight": (h,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, h)
    for n, kind in enumerate(config.layer_types):
        at = f"{prefix}layers.{n}."
        shapes |= {at + "input_layernorm.weight": (h,), at + "post_attention_layernorm.weight": (h,)}
        if kind == "linear_attention":
            gdn = at + "linear_attn."
            if fused:
                shapes |= {gdn + "in_proj_qkvz.weight": (2 * k + 2 * v, h), gdn + "in_proj_ba.weight": (2 * heads, h)}
            else:
                shapes |= {gdn + "in_proj_qkv.weight": (2 * k + v, h), gdn + "in_proj_z.weight": (v, h)}
                shapes |= {gdn + "in_proj_b.weight": (heads, h), gdn + "in_proj_a.weight": (heads, h)}
            shapes |= {gdn + "conv1d.weight": (2 * k + v, 1, config.linear_conv_kernel_dim)}
            shapes |= {gdn + "A_log": (heads,), gdn + "dt_bias": (heads,), gdn + "out_proj.weight": (h, v)}
            shapes |= {gdn + "norm.weight": (config.linear_value_head_dim,)}
        else:
            attention = {"q": (2 * nq * d, h), "k": (nkv * d, h), "v": (nkv * d, h), "o": (h, nq * d)}
            for part, shape in attention.items():
                shapes[f"{at}self_attn.{part}_proj.weight"] = shape
                if config.attention_bias:
                    shapes[f"{at}self_attn.{part}_proj.bias"] = shape[:1]
            shapes |= {at + "self_attn.q_norm.weight": (d,), at + "self_attn.k_norm.weight": (d,)}
        if not config.moe_layers[n]:
            shapes |= _swiglu(at + "mlp.", h, config.intermediate_size)
            continue
        i = config.moe_intermediate_size
        assert i is not None
        shapes |= {at + "mlp.gate.weight": (e, h), at + "mlp.shared_expert_gate.weight": (1, h)}
        shapes |= _swiglu(at + "mlp.shared_expert.", h, config.shared_expert_intermediate_size)
        if stacked:
            shapes |= {at + "mlp.experts.gate_up_proj": (e, 2 * i, h), at + "mlp.experts.down_proj": (e, h, i)}
        else:
            for expert in range(e):
                shapes |= _swiglu(f"{at}mlp.experts.{expert}.", h, i)
    return shapes


def _swiglu(prefix: str, h: int, i: int | None) -> dict[str, tuple[int, ...]]:
    assert i is not None
    shapes = {"gate": (i, h), "up": (i, h), "down": (h, i)}
    return {f"{prefix}{part}_proj.weight": shape for part, shape in shapes.items()}


def tagged(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """float32 tensors in which no value occurs twice."""
    tensors, start = {}, 0
    for name, shape in shapes.items():
        count = int(torch.Size(shape).numel())
        tensors[name] = torch.arange(start, start + count, dtype=torch.float32).view(shape)
        start += count
    return tensors


def mtp_shapes(moe: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"mtp.fc.weight": (16, 32)}
    shapes |= {f"mtp.{name}.weight": (16,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    config = make_config("qwen3_5_moe" if moe else "qwen3_5", num_hidden_layers=1, layer_types=("full_attention",))
    layer = checkpoint_shapes(config, "mtp.", stacked=True)
    return shapes | {name: shape for name, shape in layer.items() if name.startswith("mtp.layers.0.")}


def opened(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    write_tensors(tensors, folder, shards)
    return Checkpoint.open(folder)


def converted(plan: WeightPlan, checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return dict(stream_weights(plan, checkpoint, dtype))


def planned(
    folder: Path, config: ModelConfig, tensors: dict[str, torch.Tensor], quantization: dict[str, Any] | None = None
) -> tuple[WeightPlan, Checkpoint]:
    checkpoint = opened(folder, tensors)
    return plan_weights(config, checkpoint, quantization), checkpoint
