"""The two criteria: float32 against Hugging Face's float32, bfloat16 against Hugging Face's own bfloat16 error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from tests.comparison import relative
from tests.true_sizes.runs import Run, Side, Text, our_side, step_by_step, their_side
from tests.true_sizes.shared_model import Pair, in_float32

FLOOR, FACTOR_OF_OWN, BFLOAT16_FACTOR = 1e-5, 3.0, 1.1
# Routers whose inputs differ by float32 rounding disagree only about experts that are nearly equally probable.
NEAR_TIE = 1e-3
STEP_BY_STEP_TOKENS, STEP_BY_STEP_SECONDS = 700, 60.0
FEW_TOKENS = 50


def float32_verdict(pair: Pair, texts: Sequence[Text]) -> tuple[dict[str, Any], list[Run]]:
    """Each text: rel <= max(1e-5, 3 x the difference between Hugging Face's chunked and step-by-step prefill).

    `rel` is the largest difference over the largest logit of that text, over the kept logits of the prompt and all
    decode steps. The step-by-step prefill of a prompt over 700 tokens is left out where it would take over a minute;
    the largest difference of the other texts stands for it. A model stored in 16 bit is widened layer by layer, so the
    weights are rounded ones.

    Where a router chooses other experts than Hugging Face's (at a near tie: `NEAR_TIE`), the run is repeated with
    Hugging Face's choice. Also returns Hugging Face's runs.
    """
    with ExitStack() as stack:
        if pair.dtype != torch.float32:
            stack.enter_context(in_float32(pair.reference, pair.reference.model.layers))
            stack.enter_context(in_float32(pair.model, pair.model.layers))
        theirs, ours = their_side(pair), our_side(pair, torch.float32)
        exact, rows = [], []
        seconds_per_token = 0.0
        for text in texts:
            reference = theirs.run(text)
            row: dict[str, Any] = {"text": text.name, "seconds_theirs": reference.seconds}
            row["ours"] = against(reference, ours, text)
            if text.length <= STEP_BY_STEP_TOKENS or text.length * seconds_per_token < STEP_BY_STEP_SECONDS:
                with step_by_step(pair):
                    row["own"] = against(reference, theirs, text)
                seconds_per_token = row["own"]["seconds"] / len(text.ids)
            exact.append(reference)
            rows.append(row)
            _progress(f"float32, {text.name}: rel {row['ours']['rel']:.2e}, {row['ours']['seconds']:.1f} s")
    largest = max(row["own"]["rel"] for row in rows if "own" in row)
    for row in rows:
        row["bound"] = max(FLOOR, FACTOR_OF_OWN * (row["own"]["rel"] if "own" in row else largest))
        row["ok"] = row["ours"]["rel"] <= row["bound"] and row["ours"]["flip_gap"] <= NEAR_TIE
    return {"ok": all(row["ok"] for row in rows), "texts": rows}, exact


def against(reference: Run, side: Side, text: Text) -> dict[str, Any]:
    """How far a run of `side` is from `reference`, and how often their routers disagree: with the same experts."""
    run = side.run(text)
    flips, gap = _flips(run.experts, reference.experts), 0.0
    if flips:
        run = side.run(text, reference.experts)
        gap = run.gap
    return {
        "rel": relative(run.logits, reference.logits),
        "rel_prefill": relative(run.logits[: text.kept], reference.logits[: text.kept]),
        "same_top": (run.logits.argmax(-1) == reference.logits.argmax(-1)).float().mean().item(),
        "flips": flips,
        "flip_gap": gap,
        "seconds": run.seconds,
    }


def _flips(experts: Tensor, expected: Tensor) -> int:
    """Tokens and layers with another set of experts."""
    return int((experts != expected).any(dim=-1).sum())


def bfloat16_verdict(pair: Pair, texts: Sequence[Text], exact: Sequence[Run]) -> dict[str, Any]:
    """Mean |logit error| against `exact`, float32 on the same rounded weights: ours over Hugging Face's is at most 1.1,
    pooled over the texts, for prefill and for decode.

    A mixture of experts is compared over all tokens with float32's experts taken in both runs, and over those tokens
    whose expert sets equal float32's in both free runs and every layer, where these are enough (`FEW_TOKENS`; many
    layers and experts leave few).
    """
    sides = (our_side(pair, torch.bfloat16), their_side(pair))
    sparse = any(pair.config.moe_layers)
    free, taken = _Errors(), _Errors()
    flips = [0, 0]
    for text, reference in zip(texts, exact, strict=True):
        runs = [side.run(text) for side in sides]
        compared = slice(text.length - text.kept, None)
        same = torch.ones(len(reference.logits), dtype=torch.bool)
        for number, run in enumerate(runs):
            same &= ~(run.experts != reference.experts)[compared].flatten(1).any(dim=1)
            flips[number] += _flips(run.experts, reference.experts)
        free.add(runs, reference, same, text.kept)
        if sparse:
            forced = [side.run(text, reference.experts) for side in sides]
            taken.add(forced, reference, torch.ones_like(same), text.kept)
        _progress(f"bfloat16, {text.name}: {runs[0].seconds:.1f} s ours, {runs[1].seconds:.1f} s theirs")
    result: dict[str, Any] = {"largest_logit": max(run.logits.abs().max().item() for run in exact)}
    result["free"] = free.result()
    counted = [result["free"]]
    if sparse:
        result |= {"float32_experts": taken.result(), "flips_ours": flips[0], "flips_theirs": flips[1]}
        enough = min(result["free"][part]["tokens"] for part in ("prefill", "decode")) >= FEW_TOKENS
        counted = [result["float32_experts"], *([result["free"]] if enough else [])]
    ratios = [errors[part]["ratio"] for errors in counted for part in ("prefill", "decode")]
    return {"ok": all(ratio <= BFLOAT16_FACTOR for ratio in ratios), **result}


class _Errors:
    """Sums of |error| of our run and theirs, over some tokens of prefill and of decode."""

    def __init__(self) -> None:
        self.sums = torch.zeros(2, 2, dtype=torch.float64)  # prefill, decode; ours, theirs
        self.tokens = [0, 0]

    def add(self, runs: Sequence[Run], reference: Run, use: Tensor, kept: int) -> None:
        for part, rows in enumerate((slice(None, kept), slice(kept, None))):
            self.tokens[part] += int(use[rows].sum())
            for number, run in enumerate(runs):
                error = (run.logits[rows][use[rows]] - reference.logits[rows][use[rows]]).abs()
                self.sums[part, number] += error.sum(dtype=torch.float64)
        self.vocabulary = reference.logits.shape[1]

    def result(self) -> dict[str, Any]:
        return {
            name: {
                "tokens": self.tokens[part],
                "ours": (self.sums[part, 0] / max(1, self.tokens[part]) / self.vocabulary).item(),
                "theirs": (self.sums[part, 1] / max(1, self.tokens[part]) / self.vocabulary).item(),
                "ratio": (self.sums[part, 0] / self.sums[part, 1]).item() if self.tokens[part] else None,
            }
            for part, name in enumerate(("prefill", "decode"))
        }


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
