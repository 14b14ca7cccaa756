"""This project's model without graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nxdi_qwen.compile.artifact import current_libraries
from nxdi_qwen.compile.buckets import Buckets
from nxdi_qwen.compile.executor import EagerExecutor, Executor
from nxdi_qwen.compile.source import DTYPES, ModelSource, Progress, no_progress
from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.layers.mlp import SparseMoE
from nxdi_qwen.modeling.model import HybridCausalLM
from nxdi_qwen.parity.eager_layer import run_eager_layer
from nxdi_qwen.parity.layer_run import LayerCase, LayerRun
from nxdi_qwen.parity.records import Description
from nxdi_qwen.parity.targets.side import OF_THE_CHECKPOINT
from nxdi_qwen.parity.targets.slots import SlotSide
from nxdi_qwen.parity.targets.tap import Choice, ModuleTap, Tap

SLOTS = 3


class EagerSide(SlotSide):
    """The eager model; everything it computes can be seen."""

    def __init__(self, description: Description, config: ModelConfig, load: Callable[[], HybridCausalLM]) -> None:
        super().__init__(description, config, config.max_position_embeddings)
        self._load = load
        self._model: HybridCausalLM | None = None

    @classmethod
    def of_checkpoint(cls, source: ModelSource, dtype: str, progress: Progress = no_progress) -> EagerSide:
        """`dtype`: a key of `DTYPES`."""
        description = Description("eager", OF_THE_CHECKPOINT, dtype, current_libraries())
        return cls(description, source.config, lambda: source.load(DTYPES[dtype], progress=progress))

    @property
    def model(self) -> HybridCausalLM:
        """The model, loaded when first asked for."""
        if self._model is None:
            self._model = self._load()
        return self._model

    @property
    def tap(self) -> Tap:
        return ModuleTap(list(self.model.layers), router_of, read_router)

    def make_executor(self, tokens: int) -> Executor:
        return EagerExecutor(self.model, SLOTS, tokens, Buckets.choose(tokens))

    def run_layer(self, index: int, case: LayerCase) -> LayerRun:
        return run_eager_layer(self.model, index, case)

    def release(self) -> None:
        super().release()
        self._model = None


def router_of(layer: nn.Module) -> nn.Module | None:
    mlp = getattr(layer, "mlp", None)
    return mlp.router if isinstance(mlp, SparseMoE) else None


def read_router(router: nn.Module, x: Tensor, output: Any) -> Choice:
    weight = router.weight
    assert isinstance(weight, Tensor)
    with torch.no_grad():
        return Choice(functional.linear(x, weight), output[0])
