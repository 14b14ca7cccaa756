"""What the runtime runs on: anything that can encode a context, decode a step and apply the head."""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from nxdi_qwen.compile.buckets import Buckets
from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.model import Batch, HybridCausalLM, State
from nxdi_qwen.modeling.state import StateDescription, describe_state


class Executor(abc.ABC):
    """One model with fixed slots, maximum length and buckets. State goes in and comes out; nothing is kept here."""

    def __init__(self, config: ModelConfig, description: StateDescription, buckets: Buckets) -> None:
        self.config = config
        self.description = description
        self.buckets = buckets

    @abc.abstractmethod
    def context(self, batch: Batch, state: State) -> tuple[Tensor, Tensor, State]:
        """One row of a bucket's length: logits [1, V] after the last valid token, hidden [1, T, H], the new state."""

    @abc.abstractmethod
    def decode(self, batch: Batch, state: State) -> tuple[Tensor, State]:
        """One token for every slot, row i being slot i: logits [S, V], the new state."""

    @abc.abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] from hidden [N, H]."""


class EagerExecutor(Executor):
    """Runs the model itself, without graphs."""

    def __init__(self, model: HybridCausalLM, slots: int, max_length: int, buckets: Buckets) -> None:
        dtype = model.embed_tokens.weight.dtype
        super().__init__(model.config, describe_state(model.config, slots, max_length, dtype), buckets)
        self.model = model

    @torch.inference_mode()
    def context(self, batch: Batch, state: State) -> tuple[Tensor, Tensor, State]:
        out = self.model.prefill(batch, state)
        return out.logits, out.hidden, out.state

    @torch.inference_mode()
    def decode(self, batch: Batch, state: State) -> tuple[Tensor, State]:
        return self.model.decode(batch, state)

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        return self.model.head(hidden)
