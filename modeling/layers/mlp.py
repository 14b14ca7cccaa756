"""The feed-forward layers: dense SwiGLU, and the sparse mixture of experts with a gated shared expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.layers.context import Way
from nxdi_qwen.modeling.ops.experts import experts_by_block, experts_by_token, route
from nxdi_qwen.modeling.parallel import ParallelLayers, partition
from nxdi_qwen.modeling.partition import SINGLE, Over, Parallel, even


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``: [..., H] -> [..., H]."""

    def __init__(self, hidden: int, intermediate: int, layers: ParallelLayers, dtype: torch.dtype) -> None:
        super().__init__()
        self.all_reduce = layers.all_reduce
        self.gate_proj = layers.column(hidden, even(0, intermediate), dtype)
        self.up_proj = layers.column(hidden, even(0, intermediate), dtype)
        self.down_proj = layers.row(even(1, intermediate), hidden, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.all_reduce(self.partial(x))

    def partial(self, x: Tensor) -> Tensor:
        """This rank's share of the output, before the sum over the ranks."""
        return self.down_proj.partial(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Router logits [N, E] in the model's dtype, replicated on every rank."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.renormalize = config.norm_topk_prob
        self.weight = partition((config.num_experts, config.hidden_size), (), SINGLE, dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, H] -> the chosen experts [N, k] int64 and their weights [N, k]."""
        return route(functional.linear(x, self.weight), self.top_k, self.renormalize)


class Experts(nn.Module):
    """The routed experts' weights, stacked; gate and up apart, so that each is cut contiguously.

    Cut by expert over the expert-parallel groups, and along the intermediate size over the ranks of a group.
    """

    def __init__(self, config: ModelConfig, parallel: Parallel, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.moe_intermediate_size is not None
        experts, inner, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
        self.parallel = parallel
        by_expert = even(0, experts, Over.EXPERT)
        gate_cuts, down_cuts = ((by_expert, even(dim, inner, Over.TENSOR)) for dim in (1, 2))
        self.gate_proj = partition((experts, inner, hidden), gate_cuts, parallel, dtype)
        self.up_proj = partition((experts, inner, hidden), gate_cuts, parallel, dtype)
        self.down_proj = partition((experts, hidden, inner), down_cuts, parallel, dtype)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, way: Way, rank: Tensor) -> Tensor:
        """x [N, H] -> this rank's share of the output [N, H]; `chosen` numbers all experts, of all ranks."""
        if self.parallel.expert_degree > 1:
            group = torch.div(rank, self.parallel.degree // self.parallel.expert_degree, rounding_mode="trunc")
            chosen = chosen - group * self.gate_proj.shape[0]
        form = experts_by_block if way is Way.PREFILL else experts_by_token
        return form(x, self.gate_proj, self.up_proj, self.down_proj, chosen, weights)


class SparseMoE(nn.Module):
    """Routed experts plus ``sigmoid(shared_expert_gate(x)) * shared_expert(x)``."""

    def __init__(self, config: ModelConfig, layers: ParallelLayers, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.shared_expert_intermediate_size is not None
        self.all_reduce = layers.all_reduce
        self.router = Router(config, dtype)
        self.experts = Experts(config, layers.parallel, dtype)
        self.shared_expert = SwiGLU(config.hidden_size, config.shared_expert_intermediate_size, layers, dtype)
        self.shared_expert_gate = SharedExpertGate(config.hidden_size, dtype)

    def forward(self, x: Tensor, way: Way, rank: Tensor) -> Tensor:
        """x [B, T, H] -> [B, T, H]; `rank` is this rank's number, [1] int64."""
        tokens = x.reshape(-1, x.shape[-1])
        chosen, weights = self.router(tokens)
        routed = self.experts(tokens, chosen, weights, way, rank)
        # Both are shares of a sum over the ranks, so that the ranks meet once; the shared expert counts once as well.
        shared = self.shared_expert_gate(tokens) * self.shared_expert.partial(tokens)
        return self.all_reduce(routed + shared).reshape(x.shape)


class SharedExpertGate(nn.Module):
    """``sigmoid(w x)``: [N, H] -> [N, 1]."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = partition((1, hidden), (), SINGLE, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(functional.linear(x, self.weight))
