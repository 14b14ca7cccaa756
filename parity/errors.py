"""The differences of two runs' logits, or of log probabilities where a server returns only the best."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nxdi_qwen.parity.records import Run
from nxdi_qwen.parity.result import DECODE, PREFILL


@dataclass(frozen=True)
class Errors:
    """One run against the reference.

    values: [N, M] float32, target less reference: M is the vocabulary, or for a server the tokens it returned (NaN
        where it did not).
    reference: [N, V] float32 logits.
    compared: [N] bool.
    prompt_tokens: how many of the N positions are the prefill.
    top_k: how many tokens a server returned; None: all.
    best: for a server [N, k], the errors at the reference's best k tokens; where it did not return one, the least
        that the error can be.
    """

    values: Tensor
    reference: Tensor
    compared: Tensor
    prompt_tokens: int
    top_k: int | None
    best: Tensor | None

    @classmethod
    def of(cls, reference: Run, target: Run) -> Errors:
        """Raises ValueError where a side has nothing to compare."""
        expected = reference.logits
        if expected is None:
            raise ValueError("the reference has no logits")
        tokens = len(reference.prompt.ids)
        if target.logits is not None:
            compared = torch.ones(len(expected), dtype=torch.bool)
            return cls(target.logits.float() - expected, expected, compared, tokens, None, None)
        if target.top is None:
            raise ValueError("the target has neither logits nor log probabilities")
        ids, logprobs = target.top.ids, target.top.logprobs.float()
        known = (ids >= 0) & ~torch.isnan(logprobs)
        log_softmax = expected - expected.logsumexp(dim=-1, keepdim=True)
        values = torch.where(known, logprobs - log_softmax.gather(1, ids.clamp(min=0)), torch.nan)
        # A token that was not returned has at most the smallest returned log probability.
        smallest = torch.where(known, logprobs, torch.inf).amin(dim=1)
        count = ids.shape[1]
        ranked = log_softmax.topk(min(count, expected.shape[1]), dim=1)
        returned = (ranked.indices[:, :, None] == torch.where(known, ids, -1)[:, None, :]).any(dim=2)
        at_least = (ranked.values - smallest[:, None]).clamp(min=0)
        own = torch.stack(
            [
                torch.where(ids == ranked.indices[:, [n]], values, torch.nan).nan_to_num(nan=0.0).abs().amax(dim=1)
                for n in range(ranked.indices.shape[1])
            ],
            dim=1,
        )
        best = torch.where(returned, own, at_least)
        return cls(values, expected, known.any(dim=1), tokens, count, best)

    def phase(self, phase: str) -> Tensor:
        """[N] bool: the positions of a phase."""
        prefill = torch.arange(len(self.reference)) < self.prompt_tokens
        return {PREFILL: prefill, DECODE: ~prefill}[phase]

    def scale(self, phase: str) -> float:
        """The largest reference logit of a phase."""
        return self.reference[self.phase(phase)].abs().max().item()

    @cached_property
    def order(self) -> Tensor:
        return self.reference.topk(min(1000, self.reference.shape[1]), dim=1).indices

    def largest(self, top_k: int | None) -> Tensor | None:
        """[N]: the largest error over the reference's best `top_k` tokens, or over all; None beyond what is there."""
        if self.best is not None:
            if top_k is None or top_k > self.best.shape[1]:
                return None
            return self.best[:, :top_k].amax(dim=1)
        if top_k is None or top_k >= self.values.shape[1]:
            return self.values.abs().amax(dim=1)
        return self.values.gather(1, self.order[:, :top_k]).abs().amax(dim=1)

    def per_position(self) -> Tensor:
        """[N]: the largest error of everything that is compared."""
        if self.best is not None:
            return torch.where(self.compared, self.best.amax(dim=1), torch.nan)
        return self.values.abs().amax(dim=1)
