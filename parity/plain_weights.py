"""The weights of one layer in one plain layout, taken from a Hugging Face layer without the port's own recipes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

Weights = dict[str, Tensor]


class OuterWeights(NamedTuple):
    """`embedding`, `head` [V, H] and `final_norm` [H] in the model's dtype: a float64 copy would be too large."""

    embedding: Tensor
    final_norm: Tensor
    head: Tensor


def layer_weights(layer: Any, key_heads: int) -> Weights:
    """float64, but for the experts, which are large, the layer's own dtype. Common: "input norm", "post norm" [H].

    GDN: "q", "k", "v", "z", "b", "a" [rows, H]; "fused" [rows, H] where the checkpoint has q, k, v, z in one matrix by
    key head; "taps" [C, K]; "A_log", "dt_bias" [Hv]; "gated norm" [dv]; "out" [H, V].
    Attention: "q" (per head query, then gate), "k", "v", "out", each with "... bias" where there is one; "q norm",
    "k norm" [d].
    Dense: "gate", "up", "down". MoE: "router" [E, H], "experts gate up" [E, 2I, H], "experts down" [E, H, I],
    "shared gate", "shared up", "shared down", "shared expert gate" [1, H].
    """
    weights = {"input norm": layer.input_layernorm.weight, "post norm": layer.post_attention_layernorm.weight}
    if hasattr(layer, "linear_attn"):
        weights |= _gdn(layer.linear_attn, key_heads)
    else:
        weights |= _attention(layer.self_attn)
    weights |= _mlp(layer.mlp)
    return {
        name: tensor.detach() if name.startswith("experts") else tensor.detach().double()
        for name, tensor in weights.items()
    }


def outer_weights(model: Any) -> OuterWeights:
    """Of a causal language model of transformers."""
    text = getattr(model.model, "language_model", model.model)
    head = model.lm_head.weight.detach()
    return OuterWeights(text.embed_tokens.weight.detach(), text.norm.weight.detach(), head)


def _gdn(mixer: Any, key_heads: int) -> Weights:
    weights = {
        "taps": mixer.conv1d.weight[:, 0],
        "A_log": mixer.A_log,
        "dt_bias": mixer.dt_bias,
        "gated norm": mixer.norm.weight,
        "out": mixer.out_proj.weight,
    }
    dk, dv = mixer.head_k_dim, mixer.head_v_dim
    key_dim, value_dim = mixer.key_dim, mixer.value_dim
    if hasattr(mixer, "in_proj_qkvz"):
        repeats = value_dim // dv // key_heads
        fused = mixer.in_proj_qkvz.weight
        parts = fused.unflatten(0, (key_heads, -1)).split([dk, dk, repeats * dv, repeats * dv], dim=1)
        gates = mixer.in_proj_ba.weight.unflatten(0, (key_heads, -1)).split([repeats, repeats], dim=1)
        weights |= {"fused": fused, "fused ba": mixer.in_proj_ba.weight}
        weights |= {name: part.flatten(0, 1) for name, part in zip("qkvzba", (*parts, *gates), strict=True)}
    else:
        parts = mixer.in_proj_qkv.weight.split([key_dim, key_dim, value_dim])
        weights |= dict(zip("qkv", parts, strict=True))
        weights |= {name: getattr(mixer, f"in_proj_{name}").weight for name in "zba"}
    return weights


def _attention(mixer: Any) -> Weights:
    weights = {"q norm": mixer.q_norm.weight, "k norm": mixer.k_norm.weight}
    for name, module in (("q", mixer.q_proj), ("k", mixer.k_proj), ("v", mixer.v_proj), ("out", mixer.o_proj)):
        weights[name] = module.weight
        if module.bias is not None:
            weights[f"{name} bias"] = module.bias
    return weights


def _mlp(mlp: Any) -> Weights:
    if not hasattr(mlp, "experts"):
        return {name: getattr(mlp, f"{name}_proj").weight for name in ("gate", "up", "down")}
    shared = {f"shared {name}": getattr(mlp.shared_expert, f"{name}_proj").weight for name in ("gate", "up", "down")}
    return shared | {
        "router": mlp.gate.weight,
        "experts gate up": mlp.experts.gate_up_proj,
        "experts down": mlp.experts.down_proj,
        "shared expert gate": mlp.shared_expert_gate.weight,
    }


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight`` over the last dimension."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight
