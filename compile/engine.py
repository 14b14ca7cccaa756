"""The engine: a queue of requests, slots that they join and leave, tokens and text as they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nxdi_qwen.compile.executor import Executor
from nxdi_qwen.compile.sampling import SampledToken, Sampler, SamplingParams
from nxdi_qwen.compile.slot_runner import SlotRunner, check_prompt
from nxdi_qwen.compile.text import StopChecker, StreamingDecoder, TextCodec
from nxdi_qwen.modeling.errors import InputError

FINISHED_STOP = "stop"  # an end token or a stop string
FINISHED_CANCELLED = "cancelled"
FINISHED_LENGTH = "length"  # as many tokens as were asked for, or as the slot holds


@dataclass
class Completion:
    """The output of one request so far; `finish_reason` is None while it runs.

    `tokens` includes the end token that stopped it; `text` ends before a stop string, and is None without a tokenizer.
    """

    request: int
    prompt_ids: tuple[int, ...]
    tokens: list[SampledToken] = field(default_factory=list)
    text: str | None = None
    finish_reason: str | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; logprobs only where they were asked for."""
        result: dict[str, Any] = {
            "request": self.request,
            "prompt_ids": list(self.prompt_ids),
            "token_ids": self.token_ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
        }
        if self.tokens and self.tokens[0].logprob is not None:
            result["logprobs"] = [
                {"id": token.id, "logprob": token.logprob, "top": [list(pair) for pair in token.top]}
                for token in self.tokens
            ]
        return result


@dataclass(frozen=True)
class Event:
    """One new token of one request, with the text that became certain by it."""

    request: int
    token: SampledToken
    text: str
    completion: Completion


@dataclass
class _Running:
    completion: Completion
    sampler: Sampler
    end_ids: frozenset[int]
    decoder: StreamingDecoder | None
    stop: StopChecker


class Engine:
    """Serves requests on the slots of an executor.

    A request that finds no free slot waits. Every `step` first admits waiting requests (prefill and first token), then
    decodes one token for all others that run. A request's tokens depend on its own prompt, parameters and seed.
    """

    def __init__(self, executor: Executor, codec: TextCodec | None = None) -> None:
        self.codec = codec
        self.config = executor.config
        self._runner = SlotRunner(executor)
        self._waiting: deque[_Running] = deque()
        self._slots: list[_Running | None] = [None] * executor.description.slots
        self._submitted = 0

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """Queues a request and returns its number. Raises InputError for a prompt or options that cannot be served."""
        check_prompt(prompt_ids, self.config.vocab_size, self._runner.executor.description.max_length)
        if params.stop and self.codec is None:
            raise InputError("stop strings need a tokenizer: the artifact has none; use stop token ids")
        request = self._submitted
        self._submitted += 1
        completion = Completion(request, tuple(prompt_ids), text=None if self.codec is None else "")
        self._waiting.append(
            _Running(
                completion,
                Sampler(params, prompt_ids, self.config.vocab_size),
                params.end_ids(self.config.eos_token_ids),
                None if self.codec is None else StreamingDecoder(self.codec),
                StopChecker(params.stop),
            )
        )
        return request

    def cancel(self, request: int) -> None:
        """Ends a request that waits or runs; its slot is free at once. A request that has ended stays as it is."""
        for running in [*self._waiting, *filter(None, self._slots)]:
            if running.completion.request == request:
                running.completion.finish_reason = FINISHED_CANCELLED
        self._waiting = deque(waiting for waiting in self._waiting if waiting.completion.finish_reason is None)
        self._slots = [slot if slot and slot.completion.finish_reason is None else None for slot in self._slots]

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting) or any(self._slots)

    def step(self) -> list[Event]:
        """Admits what fits, then advances all that ran before by one token. Returns the new tokens."""
        ran_before = {slot: running for slot, running in enumerate(self._slots) if running is not None}
        events = []
        for slot, occupant in enumerate(self._slots):
            if occupant is None and self._waiting:
                running = self._waiting.popleft()
                self._slots[slot] = running
                events.append(self._take(slot, running, self._runner.prefill(slot, running.completion.prompt_ids)))
        if ran_before:
            logits = self._runner.decode(
                {slot: running.completion.tokens[-1].id for slot, running in ran_before.items()}
            )
            events += [self._take(slot, running, logits[slot]) for slot, running in ran_before.items()]
        return events

    def stream(self) -> Iterator[Event]:
        """All events until nothing waits or runs."""
        while self.busy:
            yield from self.step()

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Completion]:
        """Completions of the prompts, in their order."""
        numbers = [self.submit(ids, options) for ids, options in zip(prompts, params, strict=True)]
        done = {event.request: event.completion for event in self.stream()}
        return [done[number] for number in numbers]

    def _take(self, slot: int, running: _Running, logits: Tensor) -> Event:
        """Samples a request's next token, and frees its slot if that ends it."""
        completion = running.completion
        token = running.sampler.sample(logits)
        running.sampler.accept(token.id)
        completion.tokens.append(token)
        ended = token.id in running.end_ids
        text = ""
        if running.decoder is not None:
            if not ended:
                text = running.stop.push(running.decoder.push(token.id))
            if running.stop.stopped or ended:
                completion.finish_reason = FINISHED_STOP
        elif ended:
            completion.finish_reason = FINISHED_STOP
        full = self._runner.lengths[slot] >= self._runner.executor.description.max_length
        if completion.finish_reason is None and (
            full or len(completion.tokens) >= running.sampler.params.max_new_tokens
        ):
            completion.finish_reason = FINISHED_LENGTH
        if completion.finish_reason is not None:
            self._slots[slot] = None
            if running.decoder is not None and not running.stop.stopped:
                text += running.stop.push(running.decoder.flush()) + running.stop.flush()
        if completion.text is not None:
            completion.text += text
        return Event(completion.request, token, text, completion)
