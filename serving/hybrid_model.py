"""What vLLM's registry has to know of the five architectures. The models themselves are this package's graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from vllm import ModelRegistry
from vllm.config import VllmConfig

from nxdi_qwen.modeling.config_loader import load_config
from nxdi_qwen.modeling.partition import Parallel
from nxdi_qwen.modeling.state import describe_state
from nxdi_qwen.serving import hf_configs
from nxdi_qwen.serving.cache_spec import state_shapes

ARCHITECTURES = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)


class HybridModel(nn.Module):
    """Generates text, keeps a recurrent state, and of which size: all that vLLM asks of the class. It is never made."""

    is_hybrid: ClassVar[bool] = True
    has_inner_state: ClassVar[bool] = True

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        _not_here()

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """Of one layer of one rank: conv (K - 1, channels), recurrent (Hv, dv, dk)."""
        return tuple(shape for shape, _ in _state_shapes(vllm_config))

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """Of the same two tensors."""
        return tuple(dtype for _, dtype in _state_shapes(vllm_config))

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        _not_here()

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        _not_here()

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        _not_here()


def register() -> None:
    """In the place of vLLM's own classes of these names, in this process; their configurations as well, where
    transformers lacks them.
    """
    hf_configs.register()
    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, HybridModel)


def _state_shapes(vllm_config: VllmConfig) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    model = vllm_config.model_config
    parallel = Parallel(vllm_config.parallel_config.tensor_parallel_size)
    return state_shapes(describe_state(load_config(Path(model.model)).config, 1, 1, model.dtype, parallel))


def _not_here() -> NoReturn:
    raise NotImplementedError("nxdi-qwen's worker runs the graphs of an artifact; vLLM's own model loading is not used")
