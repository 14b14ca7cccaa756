"""Weights for NxDI: this project's parameters under the names and in the layout of NxDI's modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.partition import Cut, Parallel, take_part
from nxdi_qwen.modeling.weights.blocks import Block, collect
from nxdi_qwen.modeling.weights.layout import RANK, weight_cuts

_ROUTED = "mlp.routed."


def joined_parts(whole: Tensor, cuts: tuple[Cut, ...], degree: int) -> Tensor:
    """All ranks' parts of a parameter one after the other: what NxD's contiguous cutting deals out again."""
    if not cuts:
        return whole
    (cut,) = cuts
    return torch.cat([take_part(whole, cuts, Parallel(degree, rank)) for rank in range(degree)], dim=cut.dim)


def joined_state_dict(
    blocks: Iterable[Block], config: ModelConfig, dtype: torch.dtype, degree: int
) -> dict[str, Tensor]:
    """Everything that `NeuronHybridModel` loads, before NxD cuts it for its ranks; the whole model is in memory."""
    cuts = weight_cuts(config, Parallel(degree))
    result: dict[str, Tensor] = {}
    experts: dict[str, Tensor] = {}
    for name, tensor in collect(blocks, config, dtype):
        if name == RANK:
            continue
        layer, _, part = name.partition("mlp.experts.")
        if part:
            experts[part] = tensor
            if len(experts) == 3:
                result |= {layer + key: value for key, value in _experts(experts).items()}
                experts = {}
        elif name.endswith("mlp.router.weight"):
            key = name.replace("mlp.router.", _ROUTED + "router.linear_router.")
            result[key] = tensor.to(torch.float32)
        else:
            result[name] = joined_parts(tensor, cuts[name], degree)
    ranks = torch.arange(degree, dtype=torch.int32)
    result["rank_util.rank"] = ranks
    if degree > 1:
        result["embed_tokens.rank_util.rank"] = ranks.clone()
    if config.tie_word_embeddings:
        result["lm_head.weight"] = result["embed_tokens.weight"].clone()
    return result


def _experts(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """NxD's experts: gate and up side by side, [E, H, 2 I], and down [E, I, H]."""
    gate_up = torch.cat([parts["gate_proj"].transpose(1, 2), parts["up_proj"].transpose(1, 2)], dim=2)
    down = parts["down_proj"].transpose(1, 2).contiguous()
    place = _ROUTED + "expert_mlps.mlp_op."
    return {place + "gate_up_proj.weight": gate_up, place + "down_proj.weight": down}
