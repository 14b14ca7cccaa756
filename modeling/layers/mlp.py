"""The feed-forward layers: dense SwiGLU, and the sparse mixture of experts with a gated shared expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.layers.context import Way
from nxdi_qwen.modeling.ops.experts import experts_by_block, experts_by_token, route
from nxdi_qwen.modeling.parallel import SINGLE, ColumnParallelLinear, Parallel, RowParallelLinear, all_reduce, partition


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``: [..., H] -> [..., H]."""

    def __init__(self, hidden: int, intermediate: int, parallel: Parallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = ColumnParallelLinear(hidden, intermediate, parallel, dtype)
        self.up_proj = ColumnParallelLinear(hidden, intermediate, parallel, dtype)
        self.down_proj = RowParallelLinear(intermediate, hidden, parallel, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Router logits [N, E] in the model's dtype, replicated on every rank."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.renormalize = config.norm_topk_prob
        self.weight = partition((config.num_experts, config.hidden_size), None, SINGLE, dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, H] -> the chosen experts [N, k] int64 and their weights [N, k]."""
        return route(functional.linear(x, self.weight), self.top_k, self.renormalize)


class Experts(nn.Module):
    """The routed experts' weights, stacked; gate and up apart, so that each is cut contiguously along the
    intermediate size.
    """

    def __init__(self, config: ModelConfig, parallel: Parallel, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.moe_intermediate_size is not None
        experts, inner, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
        self.parallel = parallel
        self.gate_proj = partition((experts, inner, hidden), 1, parallel, dtype)
        self.up_proj = partition((experts, inner, hidden), 1, parallel, dtype)
        self.down_proj = partition((experts, hidden, inner), 2, parallel, dtype)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, way: Way) -> Tensor:
        form = experts_by_block if way is Way.PREFILL else experts_by_token
        return all_reduce(form(x, self.gate_proj, self.up_proj, self.down_proj, chosen, weights), self.parallel)


class SparseMoE(nn.Module):
    """Routed experts plus ``sigmoid(shared_expert_gate(x)) * shared_expert(x)``."""

    def __init__(self, config: ModelConfig, parallel: Parallel, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.shared_expert_intermediate_size is not None
        self.router = Router(config, dtype)
        self.experts = Experts(config, parallel, dtype)
        self.shared_expert = SwiGLU(config.hidden_size, config.shared_expert_intermediate_size, parallel, dtype)
        self.shared_expert_gate = SharedExpertGate(config.hidden_size, dtype)

    def forward(self, x: Tensor, way: Way) -> Tensor:
        """x [B, T, H] -> [B, T, H]."""
        tokens = x.reshape(-1, x.shape[-1])
        chosen, weights = self.router(tokens)
        routed = self.experts(tokens, chosen, weights, way)
        shared = self.shared_expert_gate(tokens) * self.shared_expert(tokens)
        return (routed + shared).reshape(x.shape)


class SharedExpertGate(nn.Module):
    """``sigmoid(w x)``: [N, H] -> [N, 1]."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = partition((1, hidden), None, SINGLE, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(functional.linear(x, self.weight))
