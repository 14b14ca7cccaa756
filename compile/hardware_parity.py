"""An NxDI application against this project's eager float32 model on the CPU, teacher-forced."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nxdi_qwen.compile.buckets import Buckets
from nxdi_qwen.compile.executor import EagerExecutor
from nxdi_qwen.compile.hardware_facts import Fact, available_host_bytes
from nxdi_qwen.compile.neuron_artifact import NeuronArtifact
from nxdi_qwen.compile.neuron_requests import Output, Requests
from nxdi_qwen.compile.rounding import dtype_step
from nxdi_qwen.compile.slot_runner import SlotRunner
from nxdi_qwen.compile.source import DTYPES, ModelSource, Progress
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.weights import weight_specs

STEPS = 16
DEFINITION = (
    "Reference: nxdi-qwen's own eager model of the same checkpoint, float32, on this host's CPU (not Hugging Face; the "
    "eager model is compared with transformers 5.24.0 in the project's tests). Compared are the logits after the last "
    f"token of each prompt and after each of {STEPS} further tokens, those that the reference takes greedily. max_rel: "
    "largest difference over the prompt's largest reference logit. near_ties: other tokens than the reference's whose "
    "reference logit is less than one step of the artifact's dtype (the distance of neighbouring values at the largest "
    "logit of the position) below the best; mismatches: the rest."
)


class Expected(NamedTuple):
    """`tokens` [STEPS], taken greedily after the prompt; `logits` [1 + STEPS, V] after the prompt and each of them."""

    tokens: list[int]
    logits: Tensor


@dataclass(frozen=True)
class PromptParity:
    """One prompt, `positions` logits or tokens. The entries with `rel` and `abs` are None where only tokens are known,
    or where a value is not finite; `non_finite` counts such positions.

    `worst_margin_rel`: of all tokens that are not the reference's, how far the worst is below the reference's best, in
    largest reference logits.
    """

    prompt: str
    prompt_tokens: int
    positions: int
    matches: int
    near_ties: int
    mismatches: int
    worst_margin_rel: float
    max_abs: float | None
    max_rel: float | None
    non_finite: int
    positions_rel: list[float | None]
    others: list[dict[str, Any]]  # every token that is not the reference's


def check_host_memory(source: ModelSource) -> Fact:
    """The bytes that the reference needs; no value where they are not there."""
    needed = sum(
        math.prod(shape) * dtype.itemsize for shape, dtype in weight_specs(source.config, torch.float32).values()
    )
    available = available_host_bytes()["value"]
    if available is not None and needed > available:
        reason = f"the float32 reference needs {needed} bytes of host memory, and {available} are available"
        return {"value": None, "reason": reason}
    return {"value": needed}


def reference(source: ModelSource, prompts: Mapping[str, Sequence[int]], progress: Progress) -> dict[str, Expected]:
    """What the eager model answers to each prompt, one at a time; the model is freed again."""
    longest = max(len(ids) for ids in prompts.values()) + STEPS
    model = source.load(torch.float32, progress=progress)
    runner = SlotRunner(EagerExecutor(model, 1, longest, Buckets.choose(longest)))
    expected = {}
    for done, (name, ids) in enumerate(prompts.items(), start=1):
        logits = [runner.prefill(0, ids)]
        tokens = []
        for _ in range(STEPS):
            tokens.append(int(logits[-1].argmax()))
            logits.append(runner.decode({0: tokens[-1]})[0])
        expected[name] = Expected(tokens, torch.stack(logits))
        progress("reference", done, len(prompts))
    return expected


def compare(
    requests: Requests,
    artifact: NeuronArtifact,
    prompts: Mapping[str, Sequence[int]],
    expected: Mapping[str, Expected],
    progress: Progress,
) -> list[PromptParity]:
    """Runs as many prompts side by side as there are slots, prefilled one by one, decoded together."""
    names, results = list(prompts), []
    for first in range(0, len(names), artifact.slots):
        group = names[first : first + artifact.slots]
        outputs = [[requests.prefill(slot, prompts[name])] for slot, name in enumerate(group)]
        for step in range(STEPS):
            together = requests.decode({slot: expected[name].tokens[step] for slot, name in enumerate(group)})
            for slot, own in enumerate(outputs):
                own.append(_row(together, slot))
        for slot, name in enumerate(group):
            results.append(_parity(name, len(prompts[name]), outputs[slot], expected[name].logits, artifact.dtype))
        progress("parity", len(results), len(names))
    return results


def summary(
    results: Sequence[PromptParity], artifact: NeuronArtifact, skipped: Mapping[str, str], tolerance: float
) -> dict[str, Any]:
    """The section of the report. Passed are logits within `tolerance`, in largest logits; where there are only tokens,
    those that logits within the tolerance can give: both logits of a pair may be off by it.
    """
    relative = [result.max_rel for result in results]
    known = [value for value in relative if value is not None]
    if artifact.returns_logits:
        passed = len(known) == len(results) and max(known) <= tolerance
    else:
        passed = max(result.worst_margin_rel for result in results) <= 2 * tolerance
    return {
        "definition": DEFINITION,
        "compared": "logits" if artifact.returns_logits else "tokens only: the graphs sample and return no logits",
        "tolerance": tolerance,
        "passed": passed,
        "max_rel": max(known) if len(known) == len(results) else None,
        **{
            name: sum(getattr(result, name) for result in results)
            for name in ("positions", "matches", "near_ties", "mismatches", "non_finite")
        },
        "prompts": [asdict(result) for result in results],
        "skipped": dict(skipped),
    }


def fitting(artifact: NeuronArtifact, prompts: Mapping[str, Sequence[int]]) -> tuple[dict[str, Any], dict[str, str]]:
    """The prompts that the artifact has room for, and of the others the reason."""
    skipped = {}
    for name, ids in prompts.items():
        try:
            artifact.check_length(len(ids), STEPS)
        except InputError as error:
            skipped[name] = str(error)
    return {name: ids for name, ids in prompts.items() if name not in skipped}, skipped


def _row(output: Output, row: int) -> Output:
    return Output([output.tokens[row]], None if output.logits is None else output.logits[row : row + 1])


def _parity(name: str, length: int, outputs: Sequence[Output], expected: Tensor, dtype: str) -> PromptParity:
    largest = expected.abs().max().item()
    tokens = [output.tokens[0] for output in outputs]
    others = []
    for position, (token, row) in enumerate(zip(tokens, expected, strict=True)):
        best = int(row.argmax())
        if token != best:
            margin = (row[best] - row[token]).item()
            near = margin < dtype_step(row[best].item(), DTYPES[dtype])
            others.append(
                {
                    "position": position,
                    "expected": best,
                    "token": token,
                    "margin_rel": margin / largest,
                    "near_tie": near,
                }
            )
    near_ties = sum(other["near_tie"] for other in others)
    errors: list[float] = []
    if all(output.logits is not None for output in outputs):
        actual = torch.cat([output.logits for output in outputs if output.logits is not None]).to(torch.float32)
        errors = (actual - expected).abs().amax(dim=-1).tolist()
    finite = [math.isfinite(error) for error in errors]
    worst = max(errors) if errors and all(finite) else None
    return PromptParity(
        prompt=name,
        prompt_tokens=length,
        positions=len(tokens),
        matches=len(tokens) - len(others),
        near_ties=near_ties,
        mismatches=len(others) - near_ties,
        worst_margin_rel=max((other["margin_rel"] for other in others), default=0.0),
        max_abs=worst,
        max_rel=None if worst is None else worst / largest,
        non_finite=finite.count(False),
        positions_rel=[error / largest if math.isfinite(error) else None for error in errors],
        others=others,
    )
