"""What users of a vLLM model expect of it, asked through the OpenAI client; greedy answers are Hugging Face's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.serving.server import Server
from tests.serving.stored import FAMILIES, SLOTS, Greedy, references
from tests.serving.traffic import fields, together

pytestmark = pytest.mark.vllm

NAME = "qwen3_5"


@pytest.fixture
def server(served: Callable[..., Server]) -> Server:
    return served(NAME)


@pytest.fixture
def ask(server: Server) -> Iterator[Callable[..., Any]]:
    """`ask(FIELD=VALUE, ...)`: the answer, or the stream, of the completions endpoint."""
    with server.client() as client:
        yield lambda **request: client.completions.create(**fields(NAME, request))


def longest(completions: list[Greedy]) -> Greedy:
    return max(completions, key=lambda completion: completion.certain)


def test_the_model_has_its_checkpoints_name(server: Server) -> None:
    with server.client() as client:
        assert [model.id for model in client.models.list()] == [NAME]


@pytest.mark.parametrize("place", range(0, 32, 9))
def test_a_stream_is_the_same_answer(ask: Callable[..., Any], place: int) -> None:
    expected = references(NAME).ended[place]
    whole = ask(**expected.request()).choices[0]
    *chunks, last = ask(**expected.request(stream=True, stream_options={"include_usage": True}))
    assert all(len(chunk.choices) == 1 for chunk in chunks) and not last.choices
    tokens = [token for chunk in chunks for token in chunk.choices[0].token_ids or ()]
    assert tokens == whole.token_ids
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(expected.prompt), len(tokens))
    assert len(chunks) > 1
    expected.check(tokens, whole.finish_reason)


@pytest.mark.parametrize("place", range(3))
def test_chat(server: Server, place: int) -> None:
    chat = references(NAME).chats[place]
    request = {"model": NAME, "messages": chat.messages, "temperature": 0.0, "max_completion_tokens": 24}
    body = {"ignore_eos": True, "return_token_ids": True, "chat_template_kwargs": chat.template_arguments}
    with server.client() as client:
        whole = client.chat.completions.create(**request, extra_body=body)
        assert whole.prompt_token_ids == chat.answer.prompt
        choice = whole.choices[0]
        chat.answer.check(choice.token_ids, choice.finish_reason)
        stream = client.chat.completions.create(**request, extra_body=body, stream=True)
        texts = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert choice.message.role == "assistant" and "".join(texts) == choice.message.content


def test_the_template_arguments_matter() -> None:
    thinking, none, _ = references(NAME).chats
    assert thinking.answer.prompt != none.answer.prompt


@pytest.mark.parametrize("name", FAMILIES)
def test_penalties_biases_and_forbidden_tokens(served: Callable[..., Server], name: str) -> None:
    """Beside one another and beside requests that have none of them."""
    known = references(name)
    expected = [*known.steered, *known.completions[:4]]
    for completion, answer in zip(
        expected, together(served(name), [completion.request() for completion in expected]), strict=True
    ):
        choice = answer.choices[0]
        completion.check(choice.token_ids, choice.finish_reason)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_of_these_options_changes_the_answer(name: str) -> None:
    known = references(name)
    plain = {tuple(completion.prompt): completion.tokens for completion in known.completions}
    ended = {tuple(completion.prompt): completion.tokens for completion in known.ended}
    for completion in known.steered:
        other = (ended if "min_tokens" in completion.asked else plain)[tuple(completion.prompt)]
        assert completion.tokens[: len(other)] != other[: len(completion.tokens)], completion.asked


def test_seeds(ask: Callable[..., Any], server: Server) -> None:
    prompt = references(NAME).completions[4].prompt
    request = {"prompt": prompt, "max_tokens": 24, "temperature": 1.0, "ignore_eos": True}
    alone = [ask(**request, seed=seed).choices[0].token_ids for seed in (5, 6)]
    assert alone[0] != alone[1]
    others = [request | {"seed": seed} for seed in range(7, 7 + SLOTS)]
    beside = together(server, [request | {"seed": 5}, *others, request | {"seed": 6}])
    assert [beside[0].choices[0].token_ids, beside[-1].choices[0].token_ids] == alone
    unseeded = [ask(**request).choices[0].token_ids for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_the_checkpoints_sampling_options_are_the_default(ask: Callable[..., Any]) -> None:
    request = {"prompt": references(NAME).completions[4].prompt, "max_tokens": 24, "seed": 3}
    stated = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}  # of the fixtures' generation_config.json
    assert ask(**request).choices[0].token_ids == ask(**request, **stated).choices[0].token_ids
    assert ask(**request).choices[0].token_ids != ask(**request, temperature=2.0).choices[0].token_ids


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_narrow_sampling_is_greedy(ask: Callable[..., Any], options: dict[str, Any]) -> None:
    expected = longest(references(NAME).completions)
    choice = ask(**expected.request(temperature=1.0, **{"top_k": 0, **options})).choices[0]
    expected.check(choice.token_ids)


def test_many_answers_to_one_prompt(ask: Callable[..., Any]) -> None:
    """More than there are slots, drawn by the model's probabilities."""
    scored = references(NAME).scored[1]
    count = 96
    answer = ask(prompt=scored.answer.prompt, n=count, max_tokens=1, temperature=1.0, top_p=1.0, top_k=0, seed=11)
    assert [choice.index for choice in answer.choices] == list(range(count))
    drawn = [choice.token_ids[0] for choice in answer.choices]
    probabilities = scored.output_logprobs[0].double().exp()
    probable = probabilities.topk(20)
    share = sum(token in probable.indices for token in drawn) / count
    expected = float(probable.values.sum())
    assert abs(share - expected) < 4 * (expected * (1 - expected) / count) ** 0.5 + 1 / count
    assert len(set(drawn)) > 5


def test_answers_of_one_request_are_its_own(ask: Callable[..., Any]) -> None:
    expected = longest(references(NAME).completions)
    answer = ask(**expected.request(n=3, temperature=1.0, top_k=1))
    assert len(answer.choices) == 3
    for choice in answer.choices:
        expected.check(choice.token_ids)
    different = ask(**expected.request(n=3, temperature=1.5, top_k=0, top_p=1.0, seed=1))
    assert len({tuple(choice.token_ids) for choice in different.choices}) == 3


def test_stop_strings(ask: Callable[..., Any]) -> None:
    expected = longest(references(NAME).completions)
    places = [place for place, token in enumerate(expected.tokens) if ord("!") <= token <= ord("~")]
    place = next(place for place in places[1:] if expected.tokens.index(expected.tokens[place]) == place)
    stop, text = chr(expected.tokens[place]), ask(**expected.request()).choices[0].text
    choice = ask(**expected.request(stop=[stop, "never to be seen"])).choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert choice.token_ids == expected.tokens[: place + 1]
    assert text.startswith(choice.text + stop)
    kept = ask(**expected.request(stop=stop, include_stop_str_in_output=True)).choices[0]
    assert kept.text == choice.text + stop


def test_stop_tokens(ask: Callable[..., Any]) -> None:
    expected = longest(references(NAME).completions)
    place = next(place for place in range(5, 48) if expected.tokens.index(expected.tokens[place]) == place)
    choice = ask(**expected.request(stop_token_ids=[expected.tokens[place]])).choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", expected.tokens[place])
    assert choice.token_ids == expected.tokens[: place + 1]


@pytest.mark.parametrize("name", FAMILIES)
def test_structured_output_takes_the_best_of_what_is_allowed(served: Callable[..., Server], name: str) -> None:
    """Beside requests without a grammar."""
    known = references(name)
    expected = [known.completions[0], *known.constrained, *known.completions[1:3]]
    answers = together(served(name), [completion.request() for completion in expected])
    for completion, answer in zip(expected, answers, strict=True):
        completion.check(answer.choices[0].token_ids, answer.choices[0].finish_reason)
    assert all(re.fullmatch("[a-z]{5}", answer.choices[0].text) for answer in answers[1:3])


def test_structured_output_of_other_kinds(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"slot": {"type": "integer", "minimum": 0, "maximum": 7}, "free": {"type": "boolean"}},
        "required": ["slot", "free"],
        "additionalProperties": False,
    }
    with server.client() as client:
        request = {"model": NAME, "messages": [{"role": "user", "content": "Which slot?"}], "max_completion_tokens": 60}
        form = {"type": "json_schema", "json_schema": {"name": "slot", "schema": schema}}
        answer = client.chat.completions.create(**request, seed=2, response_format=form)
        found = json.loads(answer.choices[0].message.content)
        assert found.keys() == {"slot", "free"} and type(found["slot"]) is int and type(found["free"]) is bool
        body = {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}}
        answer = client.chat.completions.create(**request, seed=2, extra_body=body)
        assert answer.choices[0].message.content in ("yes", "no", "perhaps")
