"""Suspected mistakes that any layer can have, and those of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from nxdi_qwen.parity.layer_run import Call, LayerCase
from nxdi_qwen.parity.mistakes.base import IDLE, MIXING, NORM, Mistake
from nxdi_qwen.parity.plain_layer import PlainLayer, State


class _InExperts(Mistake):
    @classmethod
    def possible(cls, layer: PlainLayer) -> bool:
        return layer.is_sparse


class _Anywhere(Mistake):
    @classmethod
    def possible(cls, layer: PlainLayer) -> bool:
        return True


class NormWithoutOne(_Anywhere):
    cause, what = NORM, "the norms multiply by w, not by 1 + w"

    def norm_weight(self, name: str) -> Tensor:
        return self.weights[name]


class BlockNormWithoutOne(_Anywhere):
    cause, what = NORM, "the norms before mixer and MLP multiply by w, not by 1 + w"

    def norm_weight(self, name: str) -> Tensor:
        return self.weights[name] + (name not in ("input norm", "post norm"))


class IdleRowWrites(_Anywhere):
    cause, what = IDLE, "an idle row writes the slot that it names"

    def idle(self, case: LayerCase, call: Call, slots: dict[int, State]) -> None:
        if call.idle_rows:
            slots[case.slots[next(iter(call.counts))]] = self.fresh()


class ExpertsRenormalized(_InExperts):
    cause, what = MIXING, "whether the chosen experts' weights are renormalised is the wrong way round"

    def renormalizes(self) -> bool:
        return not super().renormalizes()


class SharedExpertUngated(_InExperts):
    cause, what = MIXING, "the shared expert is added without its gate"

    def shared_expert(self, x: Tensor) -> Tensor:
        return super().shared_expert(x) / torch.sigmoid(x @ self.weights["shared expert gate"].T)


class SharedExpertAbsent(_InExperts):
    cause, what = MIXING, "the shared expert is not added"

    def shared_expert(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class ExpertsUnweighted(_InExperts):
    cause, what = MIXING, "the chosen experts are averaged, not weighted"

    def route(self, logits: Tensor) -> Tensor:
        return (super().route(logits) > 0).double() / self.config.num_experts_per_tok
