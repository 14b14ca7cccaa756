"""Weights: read a checkpoint strictly, rearrange it into this model's parameters, write them; one tensor at a time."""

from nxdi_qwen.modeling.weights.checkpoint import Checkpoint
from nxdi_qwen.modeling.weights.header import Header, TensorInfo, read_header
from nxdi_qwen.modeling.weights.layout import weight_specs
from nxdi_qwen.modeling.weights.load import stream_weights
from nxdi_qwen.modeling.weights.plan import WeightPlan, plan_weights
from nxdi_qwen.modeling.weights.random import random_weights
from nxdi_qwen.modeling.weights.write import write_safetensors

__all__ = [
    "Checkpoint",
    "Header",
    "TensorInfo",
    "WeightPlan",
    "plan_weights",
    "random_weights",
    "read_header",
    "stream_weights",
    "weight_specs",
    "write_safetensors",
]
