"""What stands outside the layers: the embedding, the final norm and the head."""

from __future__ import annotations

import torch
from torch import Tensor

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.parity.near_ties import DTYPES
from nxdi_qwen.parity.plain_weights import OuterWeights, rms_norm
from nxdi_qwen.parity.records import Run
from nxdi_qwen.parity.result import Place

# Rounding, in steps of the dtype, as a relative root mean square of one position: of a copy, and of a norm and a matrix
# product behind it.
EMBEDDING_STEPS, HEAD_STEPS = 1.0, 4.0
FLOAT32_HEAD_STEPS = 100.0
# Of the head's rows: how many times as many as the hidden size make the hidden states behind the norm certain.
ROWS_PER_UNKNOWN = 4


def check_embedding(reference: Run, target: Run, dtype: str) -> Place | None:
    """Whether what enters layer 0 is the reference's, rounded."""
    if reference.hidden is None or target.hidden is None:
        return None
    error = _by_position(target.hidden[0], reference.hidden[0])
    return _place("embedding", error, EMBEDDING_STEPS * torch.finfo(DTYPES[dtype]).eps, reference)


def check_head(target: Run, weights: OuterWeights, config: ModelConfig, dtype: str) -> Place | None:
    """Whether the logits follow from the target's own last hidden states and the reference's weights.

    Norm and head are told apart where the logits are the head's product with *some* vector: then the head is right.
    """
    if target.hidden is None or target.logits is None:
        return None
    eps = torch.finfo(DTYPES[dtype]).eps
    allowed = eps * (FLOAT32_HEAD_STEPS if dtype == "float32" else HEAD_STEPS)
    x = target.hidden[-1].double()
    normed = rms_norm(x, 1.0 + weights.final_norm.double(), config.rms_norm_eps)
    rows = _sample(weights.head.shape[0], ROWS_PER_UNKNOWN * weights.head.shape[1])
    head = weights.head[rows].double()
    logits = target.logits[:, rows].double()
    place = _place("final norm or head", _by_position(logits, normed @ head.T), allowed, target)
    if place is None or len(rows) <= head.shape[1] or not torch.isfinite(logits).all():
        return place
    solved = torch.linalg.lstsq(head, logits.T).solution
    remaining = _by_position(logits, (head @ solved).T)
    name = "final norm" if remaining.max() <= allowed else "head"
    return Place(name, None, place.position, place.tensor, place.situation, place.error, place.rounding)


def _sample(size: int, count: int) -> Tensor:
    """At most `count` of `size` rows, spread evenly."""
    return torch.linspace(0, size - 1, min(size, count)).long()


def _by_position(actual: Tensor, expected: Tensor) -> Tensor:
    """[N]: root mean square errors over the root mean square of all."""
    actual, expected = actual.double(), expected.double()
    scale = expected.square().mean().sqrt().clamp(min=1e-30)
    return torch.nan_to_num((actual - expected).square().mean(dim=-1).sqrt() / scale, nan=torch.inf)


def _place(name: str, error: Tensor, allowed: float, run: Run) -> Place | None:
    bad = (error > allowed).nonzero()[:, 0]
    if not len(bad):
        return None
    position = int(bad[0])
    return Place(name, None, position, "output", run.prompt.name, error[position].item(), allowed)
