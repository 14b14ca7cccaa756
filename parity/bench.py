"""One layer of a target on the bench: all cases, with inputs from the reference, beside the truth."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from nxdi_qwen.compile.source import DTYPES
from nxdi_qwen.parity.alone import Difference, Part, away_from_ties, beyond, compare_parts
from nxdi_qwen.parity.layer_run import LayerCase, LayerRun, layer_cases, prompt_case
from nxdi_qwen.parity.plain_layer import PlainLayer
from nxdi_qwen.parity.plain_weights import Weights
from nxdi_qwen.parity.records import Run, Target


class LayerBench:
    """Layer `index`, on what the reference feeds it in its `runs`, rounded to the target's dtype so that all sides get
    the same: the runs as they are, and the situations of `layer_cases`.

    The truth is the plain layer in float64 with the reference's weights; rounding is measured as the error of the
    reference itself against that, in the target's dtype. A reference that gives no weights is the truth itself, and
    rounding then is a few steps of the dtype.
    """

    def __init__(
        self, reference: Target, target: Target, sixteen_bit: Target | None, index: int, runs: Sequence[Run]
    ) -> None:
        self.reference, self.target, self.sixteen_bit, self.index = reference, target, sixteen_bit, index
        self.dtype = target.description.dtype
        self.config = reference.config
        inputs = [
            (run.prompt, run.hidden[index].to(DTYPES[self.dtype]).float()) for run in runs if run.hidden is not None
        ]
        self.cases = [prompt_case(prompt.name, x, len(prompt.ids)) for prompt, x in inputs]
        self.cases += layer_cases(torch.cat([x for _, x in inputs]), self.config.rope.mrope_section is not None)

    @cached_property
    def weights(self) -> Weights | None:
        return self.reference.layer_weights(self.index)

    @cached_property
    def plain(self) -> PlainLayer | None:
        return None if self.weights is None else PlainLayer(self.config, self.index, self.weights)

    @cached_property
    def truth(self) -> list[LayerRun]:
        if self.plain is not None:
            return [self.plain.run(case) for case in self.cases]
        return _all(self.reference, self.index, self.cases) or []

    @cached_property
    def actual(self) -> list[LayerRun] | None:
        """What the target yields; None where it cannot run a layer alone."""
        return _all(self.target, self.index, self.cases)

    @cached_property
    def counts(self) -> list[list[Tensor]]:
        return [away_from_ties(run, self.config, self.dtype) for run in self.truth]

    @cached_property
    def rounding(self) -> list[list[Part]]:
        same_dtype = self.reference if self.dtype == "float32" else self.sixteen_bit
        runs = _all(same_dtype, self.index, self.cases) if same_dtype is not None and self.plain is not None else None
        if runs is not None:
            return self._parts(runs)
        eps = torch.finfo(DTYPES[self.dtype]).eps
        parts = self._parts(self.truth)
        return [[Part(part.tensor, torch.full_like(part.by_row, eps), part.rows) for part in own] for own in parts]

    def _parts(self, runs: Sequence[LayerRun]) -> list[list[Part]]:
        return [compare_parts(*three) for three in zip(runs, self.truth, self.counts, strict=True)]

    def differences(self, expected: Sequence[LayerRun] | None = None, times: float = 1.0) -> list[Difference]:
        """Where the target differs from `expected` (None: the truth) by more than `times` what rounding allows."""
        assert self.actual is not None
        truth = self.truth if expected is None else expected
        return beyond(self.cases, self.actual, truth, self.rounding, self.counts, self.dtype, times)

    def trusted(self) -> bool:
        """Whether the plain layer is this layer: the reference agrees with it to rounding, in float32."""
        if self.plain is None:
            return False
        if self.dtype != "float32":
            return True  # measured in 16 bit, the reference's error is all that rounding is
        return all(part.error <= 1e-4 for parts in self.rounding for part in parts)


def _all(target: Target, index: int, cases: Sequence[LayerCase]) -> list[LayerRun] | None:
    runs = []
    for case in cases:
        run = target.run_layer(index, case)
        if run is None:
            return None
        runs.append(run)
    return runs
