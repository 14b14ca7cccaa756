"""The two-way verdict: errors within a tolerance, the tighter the better the reference ranks a token."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nxdi_qwen.parity.errors import Errors
from nxdi_qwen.parity.result import Band

TOP_K: tuple[int | None, ...] = (5, 50, 1000, None)
Tolerances = Mapping[int | None, float]

# Of the largest reference logit. float32: above the rounding of deep models and of the reference itself (1.6e-5 between
# its own two forms on repeated tokens), below what a wrong weight does. bfloat16: rounding alone reaches 2.5 % over the
# best logits and 3.7 % over all (`tests.parity.measure_rounding`, dense models).
TOLERANCES: dict[str, Tolerances] = {
    "float32": dict.fromkeys(TOP_K, 1e-4),
    "bfloat16": {5: 4e-2, 50: 5e-2, 1000: 5e-2, None: 5e-2},
}


def judge_bands(errors: Errors, phase: str, judged: Tensor, tolerances: Tolerances) -> list[Band]:
    """The bands of one phase over the positions `judged` [N] bool; none where nothing is compared.

    `tolerances`: by k, None for all logits. Bands that go beyond what the target gave are left out.
    """
    bands = []
    for top_k, tolerance in tolerances.items():
        per_position = errors.largest(top_k)
        if per_position is None:
            continue
        positions = (errors.phase(phase) & judged & errors.compared).nonzero()[:, 0]
        if not len(positions):
            continue
        rel = per_position[positions] / errors.scale(phase)
        # NaN compares false with everything: as an infinite error it fails and is seen.
        rel = torch.nan_to_num(rel, nan=torch.inf)
        worst = int(rel.argmax())
        largest = rel[worst].item()
        bands.append(
            Band(phase, top_k, len(positions), largest, int(positions[worst]), tolerance, largest <= tolerance)
        )
    return bands
