"""A layer alone: whether what it yields differs from the truth by more than rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nxdi_qwen.compile.source import DTYPES
from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.parity.layer_run import LayerCase, LayerRun


@dataclass(frozen=True)
class Allowance:
    """How far rounding may move a layer: `times` the reference's own error against float64 in the same dtype, and never
    less than `least` (a relative root mean square); `times_worst` for the worst single position.
    """

    times: float
    times_worst: float
    least: float


# float32: the forms differ (chunks or token by token), so that one side's error says little about the other's; faults
# start at 1e-3 (a 16-bit state). bfloat16: the same roundings on both sides. See `tests.parity.measure_causes`.
ALLOWANCES = {"float32": Allowance(30.0, 30.0, 1e-5), "bfloat16": Allowance(1.5, 2.5, 2e-3)}
# Router logits that are nearer than this, in steps of the dtype at the largest one, may be ordered either way.
TIE_STEPS = 4.0


@dataclass(frozen=True)
class Part:
    """One comparable result of a case: the output of all requests, or a request's state after one of its calls.

    `by_row`: relative root mean square errors of every token, or of a whole recurrent or conv state; `rows`: the
    request and the position of each (None for a whole state). `error`: of all rows together.
    """

    tensor: str
    by_row: Tensor
    rows: list[tuple[int, int | None]]

    @property
    def error(self) -> float:
        return self.by_row.square().mean().sqrt().item() if len(self.by_row) else 0.0

    @property
    def worst(self) -> float:
        return self.by_row.max().item() if len(self.by_row) else 0.0


@dataclass(frozen=True)
class Difference:
    """A part of a case beyond rounding, the first request and position where it is, and what rounding allows."""

    case: int
    number: int  # of the part in its case
    part: Part
    rounding: float
    request: int
    position: int | None


def compare_parts(actual: LayerRun, expected: LayerRun, counts: Sequence[Tensor]) -> list[Part]:
    """The parts in a fixed order; `counts` [T] bool by request: tokens whose output is compared."""
    pairs = list(zip(actual.requests, expected.requests, strict=True))
    errors = [(a.output.double() - e.output.double())[keep] for (a, e), keep in zip(pairs, counts, strict=True)]
    scale = _rms(torch.cat([e.output.double()[keep] for (_, e), keep in zip(pairs, counts, strict=True)]))
    places: list[tuple[int, int | None]] = [
        (request, position) for request, keep in enumerate(counts) for position in keep.nonzero()[:, 0].tolist()
    ]
    parts = [_part("output", torch.cat(errors), scale, places)]
    for request, (a, e) in enumerate(pairs):
        for mine, theirs in zip(a.states, e.states, strict=True):
            for role, tensor in theirs.items():
                difference = mine[role].double() - tensor.double()
                tokens = role in ("key", "value")
                rows = difference.flatten(1) if tokens else difference.reshape(1, -1)
                where = [(request, n if tokens else None) for n in range(len(rows))]
                parts.append(_part(role, rows, _rms(tensor.double()), where))
    return parts


def beyond(
    cases: Sequence[LayerCase],
    actual: Sequence[LayerRun],
    expected: Sequence[LayerRun],
    rounding: Sequence[list[Part]],
    counts: Sequence[Sequence[Tensor]],
    dtype: str,
    times: float = 1.0,
) -> list[Difference]:
    """What differs by more than `times` the allowance; `rounding` are the reference's own parts against the truth."""
    allowance = ALLOWANCES[dtype]
    found = []
    for case in range(len(cases)):
        parts = compare_parts(actual[case], expected[case], counts[case])
        for number, (part, own) in enumerate(zip(parts, rounding[case], strict=True)):
            allowed = times * max(allowance.times * own.error, allowance.least)
            allowed_worst = times * max(allowance.times_worst * own.worst, allowance.least)
            # NaN is above everything.
            if not (part.error <= allowed and part.worst <= allowed_worst):
                rows = (part.by_row > max(allowed, allowed_worst)).nonzero()[:, 0]
                first = part.rows[int(rows[0]) if len(rows) else int(part.by_row.argmax())]
                found.append(Difference(case, number, part, allowed, *first))
    return found


def away_from_ties(truth: LayerRun, config: ModelConfig, dtype: str) -> list[Tensor]:
    """[T] bool by request: tokens whose experts no rounding can change; all true in a dense layer."""
    counts = []
    for request in truth.requests:
        logits = request.intermediates.get("router logits")
        keep = torch.ones(len(request.output), dtype=torch.bool)
        if logits is not None and config.num_experts_per_tok < config.num_experts:
            best = logits.topk(config.num_experts_per_tok + 1, dim=-1).values
            steps = TIE_STEPS * torch.finfo(DTYPES[dtype]).eps * logits.abs().amax(dim=-1)
            keep = best[:, -2] - best[:, -1] > steps
        counts.append(keep)
    return counts


def _part(tensor: str, errors: Tensor, scale: float, rows: list[tuple[int, int | None]]) -> Part:
    by_row = errors.square().mean(dim=-1).sqrt() / scale
    return Part(tensor, torch.nan_to_num(by_row, nan=math.inf, posinf=math.inf), rows)


def _rms(x: Tensor) -> float:
    return max(x.square().mean().sqrt().item(), 1e-30) if x.numel() else 1e-30
