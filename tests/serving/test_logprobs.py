"""Log probabilities of prompts and of what is generated, through the completions endpoint, against Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch import Tensor

from tests.serving.server import Server
from tests.serving.stored import FAMILIES, references
from tests.serving.traffic import together

pytestmark = pytest.mark.vllm

COUNT, TOLERANCE = 20, 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_and_top_logprobs(served: Callable[..., Server], name: str) -> None:
    """Of prompts shorter and longer than the largest bucket, beside others."""
    known = references(name)
    requests = [
        scored.answer.request(prompt_logprobs=COUNT, logprobs=COUNT, return_tokens_as_token_ids=True)
        for scored in known.scored
    ]
    answers = together(served(name), [*requests, *(other.request() for other in known.completions[:4])])
    for scored, answer in zip(known.scored, answers, strict=False):
        choice = answer.choices[0]
        scored.answer.check(choice.token_ids)
        prompt, first = scored.answer.prompt, choice.prompt_logprobs[0]
        assert first is None and len(choice.prompt_logprobs) == len(prompt)
        for place, found in enumerate(choice.prompt_logprobs[1:]):
            values = {int(token): entry["logprob"] for token, entry in found.items()}
            compare(values, scored.prompt_logprobs[place], prompt[place + 1])
        for place, found in enumerate(choice.logprobs.top_logprobs):
            values = {int(token.removeprefix("token_id:")): value for token, value in found.items()}
            compare(values, scored.output_logprobs[place], choice.token_ids[place])
        chosen = zip(choice.token_ids, choice.logprobs.token_logprobs, scored.output_logprobs, strict=True)
        for token, value, expected in chosen:
            assert abs(value - float(expected[token])) <= TOLERANCE


@pytest.mark.parametrize("name", FAMILIES[:1])
def test_ranks_and_a_prompt_of_one_token(served: Callable[..., Server], name: str) -> None:
    scored = references(name).scored[1]
    single = references(name).completions[0]
    assert len(single.prompt) == 1
    asked: list[dict[str, Any]] = [
        scored.answer.request(prompt_logprobs=0, logprobs=0),
        single.request(prompt_logprobs=5),
    ]
    ranked, alone = (answer.choices[0] for answer in together(served(name), asked))
    for place, found in enumerate(ranked.prompt_logprobs[1:]):
        ((token, entry),) = found.items()
        expected = scored.prompt_logprobs[place]
        value = float(expected[int(token)])
        assert int(token) == scored.answer.prompt[place + 1]
        least, most = (int((expected > value + sign * TOLERANCE).sum()) + 1 for sign in (1, -1))
        assert least <= entry["rank"] <= most
    assert alone.prompt_logprobs == [None]
    single.check(alone.token_ids)


def compare(found: Mapping[int, float], expected: Tensor, chosen: int) -> None:
    """`found`: log probabilities by id, of the most likely `COUNT` and of the chosen token; `expected`: of all [V]."""
    assert chosen in found and COUNT <= len(found) <= COUNT + 1
    for token, value in found.items():
        assert abs(value - float(expected[token])) <= TOLERANCE, token
    most_likely = sorted(found.values(), reverse=True)[:COUNT]
    for value, other in zip(most_likely, expected.topk(COUNT).values.tolist(), strict=True):
        assert abs(value - other) <= TOLERANCE
