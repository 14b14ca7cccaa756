"""Many requests at once through the asynchronous OpenAI client: random arrivals, clients that leave, a full server."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.serving.server import Server
from tests.serving.stored import SLOTS, Greedy

# Fields that the client's own signature has; vLLM's others travel in the body.
_OPENAI = {
    *("prompt", "max_tokens", "temperature", "top_p", "n", "seed", "stop", "stream", "stream_options", "logprobs"),
    *("echo", "logit_bias", "presence_penalty", "frequency_penalty", "model"),
}
MEAN_PAUSE = 0.05  # seconds between arrivals
LATEST_LEAVING = 0.4  # seconds after its arrival at which a client may go away
FILLING_TOKENS = 160


def fields(model: str, request: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `completions.create` for a request, which may name another model. The answer has token ids."""
    known = {name: value for name, value in request.items() if name in _OPENAI}
    others = {name: value for name, value in request.items() if name not in _OPENAI}
    return {"model": model, **known, "extra_body": {"return_token_ids": True, **others}}


@dataclass
class Outcome:
    """What one client got; `gone`: it left before the end. `finish_reason` is None where it saw no end."""

    expected: Greedy
    tokens: list[int]
    finish_reason: str | None = None
    gone: bool = False

    def check(self) -> None:
        """Asserts that the tokens are Hugging Face's, all of them unless the client left."""
        assert self.gone or self.finish_reason is not None
        self.expected.check(self.tokens, self.finish_reason, whole=not self.gone)


def replay(server: Server, completions: Sequence[Greedy], *, seed: int, leaving: float = 0.0) -> list[Outcome]:
    """Sends all of them in random order at random times, some streamed; the share `leaving` of the clients goes away.

    A client leaves after some tokens of its stream, or at any time, also while its request still waits.
    """
    return asyncio.run(_replay(server, completions, random.Random(seed), leaving))


async def _replay(
    server: Server, completions: Sequence[Greedy], chance: random.Random, leaving: float
) -> list[Outcome]:
    async with server.asynchronous_client() as client:
        model = (await client.models.list()).data[0].id
        tasks = []
        for expected in chance.sample(completions, len(completions)):
            streamed = chance.random() < 0.5
            leaves = chance.random() < leaving and len(expected.tokens) > 1
            after_tokens = chance.randrange(1, len(expected.tokens)) if leaves and streamed else None
            after_seconds = chance.uniform(0, LATEST_LEAVING) if leaves and not streamed else None
            if streamed:
                work = _stream(client, model, expected, after_tokens)
            else:
                work = _whole(client, model, expected, after_seconds)
            tasks.append(asyncio.create_task(work))
            await asyncio.sleep(chance.expovariate(1 / MEAN_PAUSE))
        return await asyncio.gather(*tasks)


async def _whole(client: Any, model: str, expected: Greedy, seconds: float | None) -> Outcome:
    try:
        async with asyncio.timeout(seconds):
            answer = await client.completions.create(**fields(model, expected.request()))
    except TimeoutError:
        return Outcome(expected, [], gone=True)
    choice = answer.choices[0]
    return Outcome(expected, choice.token_ids, choice.finish_reason)


async def _stream(client: Any, model: str, expected: Greedy, leave_after: int | None) -> Outcome:
    outcome = Outcome(expected, [])
    async with await client.completions.create(**fields(model, expected.request(stream=True))) as stream:
        async for chunk in stream:
            outcome.tokens += chunk.choices[0].token_ids or ()
            outcome.finish_reason = chunk.choices[0].finish_reason or outcome.finish_reason
            if leave_after is not None and len(outcome.tokens) >= leave_after and outcome.finish_reason is None:
                outcome.gone = True
                break
    return outcome


def together(server: Server, requests: Sequence[dict[str, Any]]) -> list[Any]:
    """All of them at once: their answers, or the errors in their place, in order."""

    async def run() -> list[Any]:
        async with server.asynchronous_client() as client:
            model = (await client.models.list()).data[0].id
            calls = (client.completions.create(**fields(model, request)) for request in requests)
            return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(run())


def fill_all_slots(server: Server, completions: Sequence[Greedy], *, at_once: bool = True) -> None:
    """Asserts that as many requests as there are slots are answered rightly and, unless the pool of blocks is too small
    for that, at the same time.

    Where each of them has come to its first token before any is at its last, they hold a slot each.
    """
    shortest = sorted(completions, key=lambda completion: len(completion.prompt))[:2]

    async def run() -> list[tuple[float, float]]:
        async with server.asynchronous_client() as client:
            model = (await client.models.list()).data[0].id
            return await asyncio.gather(*(_first_and_last(client, model, each) for each in shortest * (SLOTS // 2)))

    times = asyncio.run(run())
    if at_once:
        assert max(first for first, _ in times) < min(last for _, last in times), "not all slots were in use at once"


async def _first_and_last(client: Any, model: str, expected: Greedy) -> tuple[float, float]:
    """Times of the first and the last of many tokens, of which those that are known are compared."""
    asked = expected.request(max_tokens=FILLING_TOKENS, ignore_eos=True, stream=True)
    tokens, times = [], []
    async with await client.completions.create(**fields(model, asked)) as stream:
        async for chunk in stream:
            tokens += chunk.choices[0].token_ids or ()
            times.append(time.monotonic())
    assert len(tokens) == FILLING_TOKENS
    expected.check(tokens[: len(expected.tokens)])
    return times[0], times[-1]
