"""The three-way verdict: is the target's error more than the rounding of 16 bits?

The float32 reference is the baseline, the reference's own 16-bit run shows what rounding does to this model and this
prompt, and the target passes when its errors cannot be told from those:

- the standard deviations: target over 16-bit reference at most `STD_RATIO`;
- the distributions: their overlapping coefficient, the area below both densities (Inman and Bradley, "The overlapping
  coefficient as a measure of agreement between probability distributions", Communications in Statistics 18, 1989), at
  least `OVERLAP`. Errors *smaller* than the 16-bit reference's are no fault: where the target's standard deviation is
  the smaller one, its errors are first scaled up to the other;
- the positions: the worst position's root mean square error over the 16-bit reference's worst at most `WORST_RATIO`,
  so that one wrong position does not hide among many right ones.

The bounds stand above what `python -m tests.parity.measure_rounding` saw over 16 models and 4 prompts each that differ
by nothing but rounding: standard deviations up to 1.55 times (where few tokens are left whose experts agree; 1.35 for
single positions of dense models, 1.1 for more), overlaps from 0.88, worst positions up to 1.9 times.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nxdi_qwen.parity.errors import Errors
from nxdi_qwen.parity.result import ThreeWay

STD_RATIO = 1.75
OVERLAP = 0.65
WORST_RATIO = 3.0
# Bins of the densities, equally probable for the 16-bit reference: at most so many, and so many values in each.
BINS, FILLED = 32, 64
SAMPLES = 2**20


def judge_rounding(
    target: Errors, sixteen_bit: Errors, phase: str, judged: Tensor, judged_sixteen_bit: Tensor
) -> ThreeWay | None:
    """The verdict on one phase; `judged` [N] bool say which positions count, for the target and for the 16-bit
    reference. None where either has none.
    """
    own = (target.phase(phase) & target.compared & judged).nonzero()[:, 0]
    other = (sixteen_bit.phase(phase) & sixteen_bit.compared & judged_sixteen_bit).nonzero()[:, 0]
    if not len(own) or not len(other):
        return None
    errors, rounding = _values(target, own), _values(sixteen_bit, other)
    std, std_rounding = errors.std().item(), rounding.std().item()
    ratio = _divide(std, std_rounding)
    position_errors = _root_mean_square(target.values[own])
    worst = int(torch.nan_to_num(position_errors, nan=math.inf).argmax())
    worst_ratio = _divide(position_errors[worst].item(), _root_mean_square(sixteen_bit.values[other]).max().item())
    shared = overlap(errors / ratio if 0 < ratio < 1 else errors, rounding)
    passed = ratio <= STD_RATIO and shared >= OVERLAP and worst_ratio <= WORST_RATIO
    return ThreeWay(
        phase=phase,
        positions=len(own),
        std_target=std,
        std_sixteen_bit=std_rounding,
        std_ratio=ratio,
        std_ratio_bound=STD_RATIO,
        overlap=shared,
        overlap_bound=OVERLAP,
        worst_ratio=worst_ratio,
        worst_ratio_bound=WORST_RATIO,
        worst=int(own[worst]),
        passed=passed or std == 0.0,
    )


def overlap(first: Tensor, second: Tensor) -> float:
    """The overlapping coefficient of two samples [n], [m]: 1 for equal distributions, 0 for disjoint ones.

    By histogram, with bins that hold equal shares of `second`.
    """
    if torch.isnan(first).any() or torch.isnan(second).any():
        return 0.0
    # Every n-th value: torch's quantile takes a limited number, and neighbours in the vocabulary are independent.
    first, second = first[:: max(1, len(first) // SAMPLES)], second[:: max(1, len(second) // SAMPLES)]
    bins = max(2, min(BINS, min(len(first), len(second)) // FILLED))
    edges = second.sort().values[torch.linspace(0, len(second) - 1, bins + 1).long()[1:-1]]
    shares = []
    for sample in (first, second):
        counts = torch.bincount(torch.searchsorted(edges, sample), minlength=bins)
        shares.append(counts / len(sample))
    return torch.minimum(*shares).sum().item()


def _values(errors: Errors, positions: Tensor) -> Tensor:
    """All errors at `positions`, flat, without those of tokens that a server left out."""
    flat = errors.values[positions].flatten()
    return flat if errors.top_k is None else flat[~torch.isnan(flat)]


def _root_mean_square(values: Tensor) -> Tensor:
    return values.square().nanmean(dim=1).sqrt()


def _divide(numerator: float, denominator: float) -> float:
    if denominator == 0.0:
        return 0.0 if numerator == 0.0 else math.inf
    return numerator / denominator
