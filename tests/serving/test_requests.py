"""Requests that arrive at random, through a real HTTP server: each completion is Hugging Face's, whatever happens
beside it, and afterwards everything is free again. `python -m tests.serving.soak` does the same for many rounds.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.serving import stored
from tests.serving.rounds import SMALL_POOL, one_round
from tests.serving.server import Server
from tests.serving.stored import FAMILIES, SLOTS, Greedy, references
from tests.serving.traffic import together

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("name", FAMILIES)
def test_references_have_few_near_ties(name: str) -> None:
    known = references(name)
    assert stored.near_ties([*known.completions, *known.long, *known.steered]) <= stored.NEAR_TIES_ALLOWED


@pytest.mark.parametrize("name", FAMILIES)
def test_random_arrivals(served: Callable[..., Server], name: str) -> None:
    found = one_round(served(name), references(name).completions, seed=1, leaving=0)
    assert (found.requests, found.left) == (32, 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_end_tokens_and_clients_that_leave(served: Callable[..., Server], name: str) -> None:
    found = one_round(served(name), references(name).ended, seed=2, leaving=0.5)
    assert found.left >= 3


@pytest.mark.parametrize("name", FAMILIES[:1])
def test_preemption(served: Callable[..., Server], name: str) -> None:
    server = served(name, *SMALL_POOL)
    plain = one_round(server, references(name).completions, seed=3, leaving=0, small_pool=True)
    leaving = one_round(server, references(name).completions, seed=4, leaving=0.5, small_pool=True)
    assert plain.preemptions > 0 and leaving.preemptions > 0


@pytest.mark.parametrize("name", FAMILIES[:1])
def test_preemption_of_requests_with_options(served: Callable[..., Server], name: str) -> None:
    """Penalties and grammars count what was made before; seeded choices go on as if nothing had been."""
    server, known = served(name, *SMALL_POOL), references(name)
    options = {"max_tokens": 96, "temperature": 1.0, "ignore_eos": True, "top_k": 0, "top_p": 1.0, "seed": 8}
    seeded = [completion.request(**options) for completion in known.completions[:4]]
    expected = [answer.choices[0].token_ids for answer in together(served(name), seeded)]
    before = server.metrics()["num_preemptions_total"]
    greedy = [*known.constrained, *known.steered, *known.completions[:6]]
    answers = together(server, [*seeded, *(completion.request() for completion in greedy)])
    assert server.metrics()["num_preemptions_total"] > before
    assert [answer.choices[0].token_ids for answer in answers[: len(seeded)]] == expected
    for completion, answer in zip(greedy, answers[len(seeded) :], strict=True):
        completion.check(answer.choices[0].token_ids, answer.choices[0].finish_reason)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_request_may_fill_a_slot(served: Callable[..., Server], name: str) -> None:
    (long,) = references(name).long
    check(served(name), [long, *references(name).completions[:3]])


def test_a_queue_longer_than_the_slots(served: Callable[..., Server]) -> None:
    known = references("qwen3_5").completions
    assert len(known) > 3 * SLOTS
    check(served("qwen3_5"), known)


def test_copies_of_one_prompt_get_one_answer(served: Callable[..., Server]) -> None:
    completion = max(references("qwen3_next").completions, key=lambda known: known.certain)
    check(served("qwen3_next"), [completion] * 20)


def check(server: Server, completions: list[Greedy]) -> None:
    """Sends all of them at the same time."""
    answers = together(server, [completion.request() for completion in completions])
    for completion, answer in zip(completions, answers, strict=True):
        choice = answer.choices[0]
        completion.check(choice.token_ids, choice.finish_reason)
