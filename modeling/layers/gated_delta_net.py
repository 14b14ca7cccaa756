"""Gated DeltaNet: the linear-attention layer with a constant-size state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.layers.context import Context, LayerState, Way
from nxdi_qwen.modeling.ops.convolution import causal_convolution
from nxdi_qwen.modeling.ops.gated_delta import gated_delta_prefill, gated_delta_verify
from nxdi_qwen.modeling.ops.normalization import gated_rms_norm
from nxdi_qwen.modeling.parallel import ParallelLayers, partition
from nxdi_qwen.modeling.partition import SINGLE, key_heads, value_heads


class GatedRMSNorm(nn.Module):
    """The output norm: plain weight [dv] kept in float32, gated by silu(z)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = partition((size,), (), SINGLE, torch.float32)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated_rms_norm(x, gate, self.weight, self.eps)


class GatedDeltaNet(nn.Module):
    """Projections, causal convolution, gated delta rule, gated norm.

    `A_log` and `dt_bias` stay float32 at every dtype.
    """

    def __init__(self, config: ModelConfig, layers: ParallelLayers, dtype: torch.dtype) -> None:
        super().__init__()
        self.key_head_dim = config.linear_key_head_dim
        self.value_head_dim = config.linear_value_head_dim
        hidden, kernel = config.hidden_size, config.linear_conv_kernel_dim
        keys = key_heads(config, 0, self.key_head_dim)
        values = value_heads(config, 0, self.value_head_dim)
        per_head = value_heads(config, 0, 1)
        self.local_key_dim = keys.part(layers.parallel).size
        self.q_proj = layers.column(hidden, keys, dtype)
        self.k_proj = layers.column(hidden, keys, dtype)
        self.v_proj = layers.column(hidden, values, dtype)
        self.z_proj = layers.column(hidden, values, dtype)
        self.b_proj = layers.column(hidden, per_head, dtype)
        self.a_proj = layers.column(hidden, per_head, dtype)
        # The taps [channels, kernel] of the causal convolution, oldest input first, each segment apart.
        self.q_conv = layers.weight((keys.size, kernel), keys, dtype)
        self.k_conv = layers.weight((keys.size, kernel), keys, dtype)
        self.v_conv = layers.weight((values.size, kernel), values, dtype)
        self.A_log = layers.weight((per_head.size,), per_head, torch.float32)
        self.dt_bias = layers.weight((per_head.size,), per_head, torch.float32)
        self.norm = GatedRMSNorm(self.value_head_dim, config.rms_norm_eps)
        self.out_proj = layers.row(value_heads(config, 1, self.value_head_dim), hidden, dtype)

    def forward(self, x: Tensor, state: LayerState, context: Context) -> tuple[Tensor, list[LayerState]]:
        """x [B, T, H]; state: recurrent rows [B, Hv, dk, dv] float32 and conv rows [B, 2K + V, kernel - 1].

        Returns the output [B, T, H] and the state after each of `context.ends` tokens.
        """
        rows, tokens, _ = x.shape
        mixed = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        taps = torch.cat([conv.weight.transpose(0, 1) for conv in (self.q_conv, self.k_conv, self.v_conv)], dim=1)
        mixed, conv_states = causal_convolution(mixed, taps, state[1], context.lengths, context.ends)
        keys_end = 2 * self.local_key_dim
        query = mixed[..., : self.local_key_dim].reshape(rows, tokens, -1, self.key_head_dim)
        key = mixed[..., self.local_key_dim : keys_end].reshape(rows, tokens, -1, self.key_head_dim)
        value = mixed[..., keys_end:].reshape(rows, tokens, -1, self.value_head_dim)

        # One rounding rule on every path: beta's sigmoid in the model's dtype, the decay in float32 throughout.
        beta = torch.sigmoid(self.b_proj(x)).to(torch.float32)
        log_decay = -torch.exp(self.A_log.weight) * _softplus(self.a_proj(x).to(torch.float32) + self.dt_bias.weight)

        inputs = (query, key, value, log_decay, beta, state[0], context.valid)
        if context.way is Way.PREFILL:
            out, recurrent_states = gated_delta_prefill(*inputs, context.masks, checkpoints=context.ends[:-1])
        else:
            out, recurrent_states = gated_delta_verify(*inputs)
        z = self.z_proj(x).reshape(rows, tokens, -1, self.value_head_dim)
        out = self.norm(out.to(x.dtype), z).reshape(rows, tokens, -1)
        return self.out_proj(out), list(zip(recurrent_states, conv_states, strict=True))


def _softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) without overflow.

    The logarithm of 1 + u in the form that keeps the digits of a small u (Goldberg, "What Every Computer Scientist
    Should Know About Floating-Point Arithmetic", theorem 4): Neuron has log1p itself from NeuronCore-v4 on only.
    """
    u = torch.exp(-x.abs())
    above = 1.0 + u
    rounded = above - 1.0
    counts = rounded.to(torch.bool)  # where u is too small to count in 1 + u, it is the result itself
    return x.clamp(min=0.0) + torch.where(counts, torch.log(above) * u / torch.where(counts, rounded, above), u)
