"""Choosing the next token of one request from its logits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nxdi_qwen.modeling.errors import InputError

# Below this, dividing by the temperature only overflows: such a request is greedy (vLLM's rule as well).
GREEDY_BELOW_TEMPERATURE = 1e-5

_FROM_GENERATION_CONFIG = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class BrokenModelError(RuntimeError):
    """Logits that no token can be chosen from."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends. The default is greedy.

    Errors: InputError that names the option, its value and its range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None  # None: no logprobs; n: the chosen token's and the n most likely ones'
    seed: int | None = None  # None: a new one for every request
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_integer("max_new_tokens", self.max_new_tokens, minimum=1)
        _check_number("temperature", self.temperature, 0, 100)
        _check_integer("top_k", self.top_k, minimum=0)
        _check_number("top_p", self.top_p, 0, 1, above_minimum=True)
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, minimum=0)
        if self.seed is not None:
            _check_integer("seed", self.seed, minimum=0, maximum=2**63 - 1)
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) and text for text in self.stop):
            raise InputError(f"stop must be a tuple of non-empty strings, got {self.stop!r}")
        if not isinstance(self.stop_token_ids, tuple):
            raise InputError(f"stop_token_ids must be a tuple of token ids, got {self.stop_token_ids!r}")
        for token_id in self.stop_token_ids:
            _check_integer("stop_token_ids", token_id, minimum=0)
        if not isinstance(self.ignore_eos, bool):
            raise InputError(f"ignore_eos must be true or false, got {self.ignore_eos!r}")

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any], **overrides: Any) -> SamplingParams:
        """The defaults of a checkpoint's `generation_config.json`, replaced by the overrides that are not None.

        As in transformers, a configuration without `do_sample: true` is greedy whatever temperature it names. As
        in vLLM, a filter it does not name is off.
        """
        values = {name: config[name] for name in _FROM_GENERATION_CONFIG if config.get(name) is not None}
        if config.get("do_sample"):
            values.setdefault("temperature", 1.0)
        else:
            values["temperature"] = 0.0
        values.update({name: value for name, value in overrides.items() if value is not None})
        return cls(**values)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < GREEDY_BELOW_TEMPERATURE

    def end_ids(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """The ids that end this request: its own and, unless `ignore_eos`, the model's."""
        return frozenset(self.stop_token_ids).union(() if self.ignore_eos else eos_token_ids)


@dataclass(frozen=True)
class SampledToken:
    """One chosen token. The logprobs are None and empty unless the request asked for them."""

    id: int
    logprob: float | None = None
    top: list[tuple[int, float]] = field(default_factory=list)  # (id, logprob), most likely first


class Sampler:
    """The sampling state of one request: its penalties' history and its own random generator.

    `sample` chooses a token; `accept` tells the sampler which token the request really took, which is then part of
    the history of the penalties. Nothing is shared with other requests, so a request's tokens depend on its own
    logits and seed only.

    Order of operations, each in float32 on [V]:

    1. repetition penalty over prompt and output (Keskar et al. 2019, CTRL; transformers'
       RepetitionPenaltyLogitsProcessor), then frequency and presence penalty over the output only
       (OpenAI: ``logit - frequency_penalty * count - presence_penalty * (count > 0)``);
    2. greedy: the largest, of equals the one with the lowest id. Otherwise: temperature, top-k, top-p, min-p, each on
       what the one before left, in transformers' order (vLLM applies min-p before top-k and top-p), then one draw.

    Ties: top-k keeps every token equal to the k-th, as transformers does; top-p keeps the lowest ids of equal ones.

    Logprobs are those of the model: log_softmax of the logits as given, before 1 and 2 (vLLM's "raw_logprobs").
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], vocab_size: int) -> None:
        self.params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)
        self._seen: Tensor | None = None  # [V] bool: in prompt or output
        self._output_counts: Tensor | None = None  # [V] float32
        if params.repetition_penalty != 1:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)
            self._seen[torch.tensor(prompt_ids, dtype=torch.int64)] = True
        if params.frequency_penalty != 0 or params.presence_penalty != 0:
            self._output_counts = torch.zeros(vocab_size)

    def accept(self, token_id: int) -> None:
        """Counts a token of the output for the penalties."""
        if self._seen is not None:
            self._seen[token_id] = True
        if self._output_counts is not None:
            self._output_counts[token_id] += 1

    def sample(self, logits: Tensor) -> SampledToken:
        """Chooses a token from logits [V] float32 on CPU, which are left unchanged.

        Errors: BrokenModelError where the logits hold NaN or +inf, or -inf only: the model is broken, not the request.
        """
        if not math.isfinite(logits.max()):  # NaN wins over every number in max
            raise BrokenModelError(_broken_logits(logits))
        scores = self._penalised(logits)
        if self.params.greedy:
            token_id = int(scores.argmax())
        else:
            ids, scores = self._filtered(scores)
            token_id = int(ids[self._draw(scores)])
        if self.params.logprobs is None:
            return SampledToken(token_id)
        logprobs = torch.log_softmax(logits, dim=-1)
        return SampledToken(token_id, float(logprobs[token_id]), _most_likely(logprobs, self.params.logprobs))

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """What `sample` draws from when not greedy: ids [C] int64, ascending, and their scores [C] float32."""
        return self._filtered(self._penalised(logits))

    def _penalised(self, scores: Tensor) -> Tensor:
        params = self.params
        if self._seen is not None:
            penalty = params.repetition_penalty
            scores = torch.where(self._seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
        if self._output_counts is not None:
            counts = self._output_counts
            scores = scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        return scores

    def _filtered(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        params = self.params
        scores = scores / params.temperature
        ids = torch.arange(scores.shape[0])
        # Each filter hands on only what it keeps: after a top-k, top-p sorts k scores, not the vocabulary.
        if 0 < params.top_k < scores.shape[0]:
            keep = scores >= torch.topk(scores, params.top_k).values[-1]
            ids, scores = ids[keep], scores[keep]
        if params.top_p < 1:
            keep = _nucleus(scores, params.top_p)
            ids, scores = ids[keep], scores[keep]
        if params.min_p > 0:
            probabilities = torch.softmax(scores, dim=-1)
            keep = probabilities >= params.min_p * probabilities.max()
            ids, scores = ids[keep], scores[keep]
        return ids, scores

    def _draw(self, scores: Tensor) -> int:
        # One uniform number a token, against the cumulative distribution in float64: float32 would lose the tail.
        cumulative = torch.softmax(scores, dim=-1).double().cumsum(dim=0)
        point = torch.rand((), dtype=torch.float64, generator=self._generator) * cumulative[-1]
        # right=True: the first entry above the point, so a token of probability zero is never drawn.
        return int(torch.searchsorted(cumulative, point, right=True))


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Mask [C] of the smallest set of most likely tokens whose probabilities reach top_p (Holtzman et al. 2020)."""
    # Ascending, and of equals the lowest id last, so that it is the last to go.
    order = torch.argsort(scores, descending=True, stable=True).flip(0)
    keep_sorted = torch.softmax(scores[order], dim=-1).cumsum(dim=-1) > 1 - top_p
    keep_sorted[-1] = True
    return torch.zeros_like(keep_sorted).scatter(0, order, keep_sorted)


def _most_likely(logprobs: Tensor, number: int) -> list[tuple[int, float]]:
    """The `number` largest of logprobs [V], of equals the lowest id first; tokens of probability zero are left out."""
    if number == 0:
        return []
    threshold = torch.topk(logprobs, min(number, logprobs.shape[0])).values[-1]
    # topk alone does not say which of equal entries it takes.
    ids = torch.nonzero((logprobs >= threshold) & (logprobs > -math.inf))[:, 0]
    ids = ids[torch.argsort(logprobs[ids], descending=True, stable=True)][:number]
    return list(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))


def _broken_logits(logits: Tensor) -> str:
    nan, infinite = int(logits.isnan().sum()), int(logits.isposinf().sum())
    found = "are all -inf" if not nan and not infinite else f"hold {nan} NaN and {infinite} +inf entries"
    return f"the model's logits {found} (of {logits.shape[0]}): no token can be chosen"


def _check_integer(name: str, value: object, minimum: int, maximum: int | None = None) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < minimum or (maximum is not None and value > maximum):  # type: ignore[operator]
        limit = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise InputError(f"{name} must be an integer {limit}, got {value!r}")


def _check_number(name: str, value: object, minimum: float, maximum: float, above_minimum: bool = False) -> None:
    inside = (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and minimum <= value <= maximum
        and not (above_minimum and value == minimum)
    )
    if not inside:
        limit = f"above {minimum} and at most {maximum}" if above_minimum else f"from {minimum} to {maximum}"
        raise InputError(f"{name} must be a number {limit}, got {value!r}")
