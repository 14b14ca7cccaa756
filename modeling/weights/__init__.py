"""Weights: read a checkpoint strictly, rearrange it into this model's parameters, write them; a few rows at a time."""

from nxdi_qwen.modeling.weights.blocks import Block, collect
from nxdi_qwen.modeling.weights.checkpoint import Checkpoint
from nxdi_qwen.modeling.weights.header import Header, TensorInfo, read_header
from nxdi_qwen.modeling.weights.layout import Specs, derived_buffers, weight_cuts, weight_shapes, weight_specs
from nxdi_qwen.modeling.weights.load import checkpoint_blocks, stream_weights
from nxdi_qwen.modeling.weights.plan import WeightPlan, plan_weights
from nxdi_qwen.modeling.weights.random import random_blocks
from nxdi_qwen.modeling.weights.write import rank_metadata, write_ranks

__all__ = [
    "Block",
    "Checkpoint",
    "Header",
    "Specs",
    "TensorInfo",
    "WeightPlan",
    "checkpoint_blocks",
    "collect",
    "derived_buffers",
    "plan_weights",
    "random_blocks",
    "rank_metadata",
    "read_header",
    "stream_weights",
    "weight_cuts",
    "weight_shapes",
    "weight_specs",
    "write_ranks",
]
