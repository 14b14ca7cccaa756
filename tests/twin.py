"""A slow float64 twin of the models: token by token, one idea per function, no Hugging Face code inside.

It reads the parameters of a Hugging Face model and computes everything in float64 (also the gated delta rule, which
Hugging Face always computes in float32), so that it tells whose rounding error is whose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import sigmoid, silu, softplus


def gated_delta_recurrence(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gated delta rule, one token after the other, in float64.

    Per head: S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; o = S^T q. Nothing is normalised or scaled here.

    Args:
        query, key: [T, Hv, dk]; L2-normalised, key heads repeated for their value heads, query times dk^-0.5.
        value: [T, Hv, dv].
        g: [T, Hv], the log decay (<= 0).
        beta: [T, Hv], in [0, 1].
        state: [Hv, dk, dv], or None for zeros.

    Returns:
        Outputs [T, Hv, dv] and the state [Hv, dk, dv] after the last token, float64.
    """
    query, key, value, g, beta = (x.double() for x in (query, key, value, g, beta))
    tokens, heads, dk = key.shape
    s = torch.zeros(heads, dk, value.shape[-1], dtype=torch.float64) if state is None else state.double().clone()
    outputs = torch.empty_like(value)
    for t in range(tokens):
        s = s * g[t].exp()[:, None, None]
        seen = torch.einsum("hkv,hk->hv", s, key[t])
        s = s + torch.einsum("hk,hv->hkv", key[t], beta[t][:, None] * (value[t] - seen))
        outputs[t] = torch.einsum("hkv,hk->hv", s, query[t])
    return outputs, s


@dataclass(frozen=True)
class TwinOutput:
    """Logits [T, V] and, by layer index, the states after the last token: GDN recurrent [Hv, dk, dv] and conv
    [2K + V, kernel - 1], attention key and value [Hkv, T, head_dim]; all float64."""

    logits: Tensor
    recurrent: dict[int, Tensor]
    conv: dict[int, Tensor]
    key: dict[int, Tensor]
    value: dict[int, Tensor]


class TwinModel:
    """The whole text model in float64, from the state dictionary of a Hugging Face causal language model."""

    def __init__(self, model: Any) -> None:
        self.config = model.config.get_text_config()
        self.weights: dict[str, Tensor] = {
            name: tensor.detach().double() for name, tensor in model.state_dict().items() if ".visual." not in name
        }
        self.prefix = "model.language_model." if "model.language_model.norm.weight" in self.weights else "model."
        if self.config.rope_parameters["rope_type"] != "default":
            raise ValueError("the twin knows the default rope only")

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> TwinOutput:
        """`ids` [T] int64, one unpadded row from position 0."""
        output = TwinOutput(torch.empty(0), {}, {}, {}, {})
        x = self.weights[f"{self.prefix}embed_tokens.weight"][ids]
        for layer, kind in enumerate(self.config.layer_types):
            mixer = self.linear_attention if kind == "linear_attention" else self.full_attention
            x = x + mixer(layer, self.norm(x, self.weight(layer, "input_layernorm.weight")), output)
            x = x + self.mlp(layer, self.norm(x, self.weight(layer, "post_attention_layernorm.weight")))
        x = self.norm(x, self.weights[f"{self.prefix}norm.weight"])
        return TwinOutput(x @ self.weights["lm_head.weight"].T, output.recurrent, output.conv, output.key, output.value)

    def weight(self, layer: int, name: str) -> Tensor:
        return self.weights[f"{self.prefix}layers.{layer}.{name}"]

    def has(self, layer: int, name: str) -> bool:
        return f"{self.prefix}layers.{layer}.{name}" in self.weights

    def linear(self, layer: int, name: str, x: Tensor) -> Tensor:
        y = x @ self.weight(layer, f"{name}.weight").T
        return y + self.weight(layer, f"{name}.bias") if self.has(layer, f"{name}.bias") else y

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Zero-centred RMS norm over the last dimension."""
        return x * (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt() * (1 + weight)

    def gdn_inputs(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Projections of `x` [T, H]: flat q, k, v [T, 2K + V], then z [T, Hv, dv], b and a [T, Hv]."""
        c, tokens = self.config, len(x)
        hk, hv, dk, dv = (
            c.linear_num_key_heads,
            c.linear_num_value_heads,
            c.linear_key_head_dim,
            c.linear_value_head_dim,
        )
        r = hv // hk
        if self.has(layer, "linear_attn.in_proj_qkvz.weight"):  # grouped by key head
            qkvz = self.linear(layer, "linear_attn.in_proj_qkvz", x).view(tokens, hk, -1)
            q, k, v, z = (part.reshape(tokens, -1) for part in qkvz.split([dk, dk, r * dv, r * dv], dim=-1))
            ba = self.linear(layer, "linear_attn.in_proj_ba", x).view(tokens, hk, 2 * r)
            b, a = (part.reshape(tokens, hv) for part in ba.split([r, r], dim=-1))
            qkv = torch.cat((q, k, v), dim=-1)
        else:
            qkv, z, b, a = (self.linear(layer, f"linear_attn.in_proj_{name}", x) for name in ("qkv", "z", "b", "a"))
        return qkv, z.view(tokens, hv, dv), b, a

    def linear_attention(self, layer: int, x: Tensor, output: TwinOutput) -> Tensor:
        c, tokens = self.config, len(x)
        qkv, z, b, a = self.gdn_inputs(layer, x)
        conv = self.weight(layer, "linear_attn.conv1d.weight")[:, 0]  # [2K + V, kernel]
        kernel = conv.shape[1]
        window = torch.cat((qkv.new_zeros(kernel - 1, qkv.shape[1]), qkv))
        output.conv[layer] = window[tokens:].T
        mixed = silu(torch.stack([(window[t : t + kernel] * conv.T).sum(0) for t in range(tokens)]))

        key_dim = c.linear_num_key_heads * c.linear_key_head_dim
        q, k, v = mixed.split([key_dim, key_dim, mixed.shape[1] - 2 * key_dim], dim=-1)
        heads = c.linear_num_value_heads
        q, k = (part.view(tokens, c.linear_num_key_heads, -1) for part in (q, k))
        q, k = (part * (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for part in (q, k))
        # Value head j reads key head j // r.
        source = torch.arange(heads) // (heads // c.linear_num_key_heads)
        q, k = q[:, source] * c.linear_key_head_dim**-0.5, k[:, source]
        g = -self.weight(layer, "linear_attn.A_log").exp() * softplus(a + self.weight(layer, "linear_attn.dt_bias"))
        y, state = gated_delta_recurrence(q, k, v.view(tokens, heads, -1), g, sigmoid(b))
        output.recurrent[layer] = state

        y = y * (y.square().mean(-1, keepdim=True) + c.rms_norm_eps).rsqrt()
        y = self.weight(layer, "linear_attn.norm.weight") * y * silu(z)
        return self.linear(layer, "linear_attn.out_proj", y.reshape(tokens, -1))

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate the first dimensions of `x` [T, heads, head_dim] by position; halves are the pairs. The frequencies
        are the model's (rounded to float32), the angles are not rounded. For text the mrope axes are equal."""
        rope = self.config.rope_parameters
        dim = int(self.config.head_dim * rope["partial_rotary_factor"])
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        angles = torch.arange(len(x), dtype=torch.float64)[:, None] * (1.0 / rope["rope_theta"] ** exponents).double()
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second, rest = x.split([dim // 2, dim // 2, x.shape[-1] - dim], dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)

    def full_attention(self, layer: int, x: Tensor, output: TwinOutput) -> Tensor:
        c, tokens = self.config, len(x)
        q, gate = self.linear(layer, "self_attn.q_proj", x).view(tokens, -1, 2 * c.head_dim).chunk(2, dim=-1)
        k, v = (self.linear(layer, f"self_attn.{n}_proj", x).view(tokens, -1, c.head_dim) for n in ("k", "v"))
        q = self.rotate(self.norm(q, self.weight(layer, "self_attn.q_norm.weight")))
        k = self.rotate(self.norm(k, self.weight(layer, "self_attn.k_norm.weight")))
        output.key[layer], output.value[layer] = k.transpose(0, 1), v.transpose(0, 1)
        heads, groups = c.num_attention_heads, c.num_attention_heads // c.num_key_value_heads
        future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        y = torch.empty_like(q)
        for head in range(heads):
            scores = q[:, head] @ k[:, head // groups].T * c.head_dim**-0.5
            y[:, head] = scores.masked_fill(future, float("-inf")).softmax(-1) @ v[:, head // groups]
        return self.linear(layer, "self_attn.o_proj", (y * sigmoid(gate)).reshape(tokens, -1))

    def swiglu(self, layer: int, name: str, x: Tensor) -> Tensor:
        hidden = silu(self.linear(layer, f"{name}.gate_proj", x)) * self.linear(layer, f"{name}.up_proj", x)
        return self.linear(layer, f"{name}.down_proj", hidden)

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        if not self.has(layer, "mlp.gate.weight"):
            return self.swiglu(layer, "mlp", x)
        probabilities = self.linear(layer, "mlp.gate", x).softmax(-1)
        weights, chosen = probabilities.topk(self.config.num_experts_per_tok)
        if getattr(self.config, "norm_topk_prob", True):  # Qwen3.5 has no such key and always renormalises
            weights = weights / weights.sum(-1, keepdim=True)
        gate_up, down = self.weight(layer, "mlp.experts.gate_up_proj"), self.weight(layer, "mlp.experts.down_proj")
        y = sigmoid(self.linear(layer, "mlp.shared_expert_gate", x)) * self.swiglu(layer, "mlp.shared_expert", x)
        for t in range(len(x)):
            for expert, weight in zip(chosen[t].tolist(), weights[t], strict=True):
                gate, up = (gate_up[expert] @ x[t]).chunk(2)
                y[t] += weight * (down[expert] @ (silu(gate) * up))
        return y
