"""The sparse layer with NxDI's own router and experts, where its kernels are; the shared expert stays ours."""

from __future__ import annotations

import torch
from neuronx_distributed_inference.modules.moe_v2 import initialize_moe_module
from torch import Tensor, nn

from nxdi_qwen.modeling.layers.context import Way
from nxdi_qwen.modeling.layers.mlp import SharedExpertGate, SwiGLU
from nxdi_qwen.modeling.nxdi.config import HybridInferenceConfig
from nxdi_qwen.modeling.parallel import ParallelLayers


class NxdSparseMoE(nn.Module):
    """Called like `modeling.layers.mlp.SparseMoE`. `routed` is NxD's MoE module; it sums over the ranks itself."""

    def __init__(self, config: HybridInferenceConfig, layers: ParallelLayers, dtype: torch.dtype) -> None:
        super().__init__()
        model = config.model
        assert model.shared_expert_intermediate_size is not None
        self.routed = initialize_moe_module(config)
        self.shared_expert = SwiGLU(model.hidden_size, model.shared_expert_intermediate_size, layers, dtype)
        self.shared_expert_gate = SharedExpertGate(model.hidden_size, dtype)

    def forward(self, x: Tensor, way: Way, rank: Tensor) -> Tensor:
        """x [B, T, H] -> [B, T, H]."""
        return self.routed(x)[0] + self.shared_expert_gate(x) * self.shared_expert(x)
