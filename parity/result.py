"""The outcome of a comparison, ready for JSON: what reports are made from."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from nxdi_qwen.parity.records import Description

PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True)
class NonFinite:
    """The first NaN or infinity of one side, in the order of computation.

    `tensor` is "embedding", "hidden states", "logits", "logprobs", or for example "recurrent state" or "key cache";
    `layer` is None for the embedding and the logits. `step` 0 is the prefill, n the n-th decode step. `position` counts
    all N tokens; it is None for a state that belongs to no single token.
    """

    side: str
    tensor: str
    layer: int | None
    step: int
    position: int | None
    value: str  # "NaN" or "inf"
    count: int  # of such values in the whole tensor

    def line(self) -> str:
        layer = "" if self.layer is None else f", layer {self.layer}"
        step = "prefill" if self.step == 0 else f"decode step {self.step}"
        position = "" if self.position is None else f", position {self.position}"
        return f"{self.value} in the {self.side}'s {self.tensor}{layer}, {step}{position} ({self.count} such values)"


@dataclass(frozen=True)
class Band:
    """The largest error over the `top_k` best logits of the reference (None: all), relative to the largest reference
    logit of the phase, among `positions` judged positions; `worst` is the position (of all N) where it stands.
    """

    phase: str
    top_k: int | None
    positions: int
    max_rel: float
    worst: int
    tolerance: float
    passed: bool


@dataclass(frozen=True)
class ThreeWay:
    """The target's errors beside those of the 16-bit reference, both against float32, over one phase.

    `std_ratio`: of the standard deviations. `overlap`: of the distributions, 1 for equal ones. `worst_ratio`: root mean
    square error of the target's worst position over that of the 16-bit reference's worst. All bounds are in `rounding`.
    """

    phase: str
    positions: int
    std_target: float
    std_sixteen_bit: float
    std_ratio: float
    std_ratio_bound: float
    overlap: float
    overlap_bound: float
    worst_ratio: float
    worst_ratio_bound: float
    worst: int
    passed: bool


@dataclass(frozen=True)
class TokenFlip:
    """A position where the target's best token is not the reference's.

    `margin`: the reference's best less its second best logit; `step`: of the target's dtype at the best logit. A flip
    is a near tie where the margin is below the step.
    """

    position: int
    phase: str
    reference_token: int
    target_token: int
    margin: float
    step: float
    near_tie: bool


@dataclass(frozen=True)
class RoutingFlip:
    """A token whose experts differ in a sparse layer, and in none before it.

    `margin`: of the reference's router, k-th less (k + 1)-th probability; `rounding`: what rounding moves that margin.
    """

    layer: int
    position: int
    margin: float | None
    rounding: float
    near_tie: bool


@dataclass(frozen=True)
class PromptResult:
    """One prompt of `tokens` tokens and `steps` decode steps.

    Lists have one entry for each of the N = tokens + steps positions (None: not compared): `positions_rel` the largest
    error over the phase's largest reference logit, `margins` the reference's best less second best logit, `top1`
    whether the best token is the same, `judged` whether the position counts for the verdict. `hidden_rel`
    [layers + 1][N] and `states_rel` (by name, an entry for every step, for keys and values for every position) are root
    mean square errors over the root mean square of the reference; `..._sixteen_bit` the same for the 16-bit reference.
    None: not there.
    """

    prompt: str
    tokens: int
    steps: int
    compared: str  # "logits" or "logprobs of the best k"
    not_compared: tuple[str, ...]
    non_finite: tuple[NonFinite, ...]
    bands: tuple[Band, ...]
    three_way: tuple[ThreeWay, ...]
    token_flips: tuple[TokenFlip, ...]
    sixteen_bit_flips: int | None
    routing_flips: tuple[RoutingFlip, ...]
    positions_rel: list[float | None]
    sixteen_bit_rel: list[float | None] | None
    margins: list[float]
    top1: list[bool | None]
    judged: list[bool]
    hidden_rel: list[list[float]] | None
    hidden_rel_sixteen_bit: list[list[float]] | None
    states_rel: dict[str, list[float]] | None
    states_rel_sixteen_bit: dict[str, list[float]] | None
    two_way_passed: bool
    three_way_passed: bool | None
    passed: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Where the target parts from the reference.

    `name`: "embedding", "layer 3", "final norm", "head", or "final norm or head". `position`: of the run where it shows
    there, otherwise of the request in `situation`. `tensor`: what differs, "output" or a state's role. `error` and
    `rounding` are relative root mean squares: the target's and what the reference's own rounding allows.
    """

    name: str
    layer: int | None
    position: int | None
    tensor: str
    situation: str
    error: float
    rounding: float


@dataclass(frozen=True)
class Cause:
    """`name` is "cause unknown" where no evidence is specific; `first_parting`: the first intermediate result that
    differs, as far as the target shows them.
    """

    name: str
    evidence: str
    first_parting: str | None


@dataclass(frozen=True)
class Drill:
    """`place` None: every part alone agrees with the reference; `notes`: how it was looked for."""

    place: Place | None
    cause: Cause | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Everything that a report shows. `lines` stand first in every report, the most urgent one first."""

    reference: Description
    target: Description
    sixteen_bit: Description | None
    prompts: tuple[PromptResult, ...]
    drill: Drill | None
    passed: bool
    lines: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: numbers that JSON does not know become the strings "NaN", "inf" and "-inf"."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value
