"""Output-gated attention with grouped heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.layers.context import Context, LayerState
from nxdi_qwen.modeling.layers.norm import ZeroCenteredRMSNorm
from nxdi_qwen.modeling.ops.attention import append_to_cache, cached_attention, segment_attention
from nxdi_qwen.modeling.ops.rotary import apply_rotary
from nxdi_qwen.modeling.parallel import ParallelLayers
from nxdi_qwen.modeling.partition import kv_heads, query_heads


class GatedAttention(nn.Module):
    """Full attention whose output is multiplied by ``sigmoid(gate)``; `q_proj` yields per head the query, then the
    gate.
    """

    def __init__(self, config: ModelConfig, layers: ParallelLayers, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = layers.column(hidden, query_heads(config, 0, 2 * self.head_dim), dtype, bias)
        self.k_proj = layers.column(hidden, kv_heads(config, 0, self.head_dim), dtype, bias)
        self.v_proj = layers.column(hidden, kv_heads(config, 0, self.head_dim), dtype, bias)
        self.o_proj = layers.row(query_heads(config, 1, self.head_dim), hidden, dtype, bias)
        self.q_norm = ZeroCenteredRMSNorm(self.head_dim, config.rms_norm_eps, dtype)
        self.k_norm = ZeroCenteredRMSNorm(self.head_dim, config.rms_norm_eps, dtype)

    def forward(self, x: Tensor, state: LayerState, context: Context) -> tuple[Tensor, list[LayerState]]:
        """x [B, T, H]; state: key and value cache rows [B, Hkv, L, head_dim].

        The cache is returned once for every entry of `context.ends`: positions beyond a length are never read, so one
        tensor serves all of them.
        """
        rows, tokens, _ = x.shape
        query_and_gate = self.q_proj(x).reshape(rows, tokens, -1, 2 * self.head_dim)
        query = self.q_norm(query_and_gate[..., : self.head_dim])
        gate = query_and_gate[..., self.head_dim :]
        key = self.k_norm(self.k_proj(x).reshape(rows, tokens, -1, self.head_dim))
        value = self.v_proj(x).reshape(rows, tokens, -1, self.head_dim)

        query = apply_rotary(query, context.cos, context.sin).transpose(1, 2)
        key = apply_rotary(key, context.cos, context.sin)
        key_cache = append_to_cache(state[0], key, context.start, context.lengths)
        value_cache = append_to_cache(state[1], value, context.start, context.lengths)
        if context.fresh:
            out = segment_attention(query, key.transpose(1, 2), value.transpose(1, 2), context.lengths)
        else:
            out = cached_attention(query, key_cache, value_cache, context.start, context.lengths)
        out = (out * torch.sigmoid(gate)).reshape(rows, tokens, -1)
        return self.o_proj(out), [(key_cache, value_cache)] * len(context.ends)
