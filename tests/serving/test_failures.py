"""Bad requests, and servers that are killed: nobody else notices, and the next start works."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import listing
from tests.serving import stored
from tests.serving.server import Server, free_port, serving, waited
from tests.serving.stored import FAMILIES, MAX_LENGTH, Greedy, references
from tests.serving.traffic import FILLING_TOKENS, fields, together

pytestmark = pytest.mark.vllm

NAME = FAMILIES[1]
PROMPT = [1, 2, 3]
PIXEL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}

# Fields beside a good request's, and what the reason names.
BAD_COMPLETIONS: dict[str, tuple[dict[str, Any], str]] = {
    "longer than a slot": ({"prompt": [1] * (MAX_LENGTH + 1)}, f"{MAX_LENGTH} tokens"),
    "no room for an answer": ({"prompt": [1] * MAX_LENGTH}, "max_tokens"),
    "an id outside": ({"prompt": [1, 272]}, "272"),
    "a negative id": ({"prompt": [1, -1]}, "-1"),
    "one of two prompts": ({"prompt": [PROMPT, [272]]}, "272"),
    "no prompt": ({"prompt": []}, "prompt"),
    "no tokens": ({"max_tokens": 0}, "max_tokens"),
    "an unknown field": ({"temprature": 1}, "temprature"),
    "temperature": ({"temperature": -1}, "temperature"),
    "top_p": ({"top_p": 2}, "top_p"),
    "n": ({"n": 0}, "n must be"),
    "seed": ({"seed": "x"}, "seed"),
    "repetition penalty": ({"repetition_penalty": 0}, "repetition_penalty"),
    "too many logprobs": ({"logprobs": 21}, "21"),
    "a bias for no token": ({"logit_bias": {"999": 1}}, "999"),
    "a stop token that is none": ({"stop_token_ids": [999]}, "999"),
    "an empty stop string": ({"stop": [""]}, "stop"),
    "not a regular expression": ({"structured_outputs": {"regex": "["}}, "regex"),
    "not a schema": ({"structured_outputs": {"json": {"type": "nonsense"}}}, "nonsense"),
    "another model": ({"model": "another"}, "another"),
    "embeddings": ({"prompt_embeds": "AAAA"}, "prompt"),
}
BAD_CHATS: dict[str, tuple[dict[str, Any], str]] = {
    "an image": ({"messages": [{"role": "user", "content": [PIXEL]}]}, "multimodal"),
    "an unknown field": ({"extra_body": {"enable_thinking": False}}, "enable_thinking"),
    "no message": ({"messages": []}, "message"),
    "template arguments": ({"extra_body": {"chat_template_kwargs": 3}}, "chat_template_kwargs"),
}


@pytest.fixture
def server(served: Callable[..., Server]) -> Server:
    return served(NAME)


@pytest.fixture
def running(server: Server) -> Iterator[None]:
    """Another request, which runs while the test does and ends rightly."""
    expected = references(NAME).long[0]
    with server.client() as client, client.completions.create(**fields(NAME, expected.request(stream=True))) as stream:
        tokens = list(next(iter(stream)).choices[0].token_ids)
        yield
        for chunk in stream:
            tokens += chunk.choices[0].token_ids or ()
    expected.check(tokens)


@pytest.mark.usefixtures("running")
def test_bad_requests_are_refused_with_the_reason_while_others_run(server: Server) -> None:
    from openai import APIStatusError

    before = server.metrics()
    with server.client() as client:
        for what, (wrong, reason) in BAD_COMPLETIONS.items():
            with pytest.raises(APIStatusError) as refused:
                client.completions.create(**fields(NAME, {"prompt": PROMPT, "max_tokens": 4} | wrong))
            assert 400 <= refused.value.status_code < 500 and reason in str(refused.value), what
        good = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 4}
        for what, (wrong, reason) in BAD_CHATS.items():
            with pytest.raises(APIStatusError) as refused:
                client.chat.completions.create(**good | wrong)
            assert 400 <= refused.value.status_code < 500 and reason in str(refused.value), what
        client.chat.completions.create(**good)
    after = server.metrics()
    assert after["num_requests_running"] == 1, "the other request had ended before"
    for path, bad in (("/v1/completions", BAD_COMPLETIONS), ("/v1/chat/completions", BAD_CHATS)):
        assert after.refused(path) - before.refused(path) == len(bad), path


def test_killed_in_mid_request(log: Path) -> None:
    """First the front alone, whose engine must leave as well; then, of a new one on the same port, the engine alone."""
    artifact, port = stored.artifact(NAME), free_port()
    before = listing(artifact)
    completions = references(NAME).completions[:4]
    with serving(artifact, log, port=port) as server:
        begin_long_request(server, completions[0])
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(10)
        assert waited(lambda: not server.group(), 30), "the engine outlived the server"
    with serving(artifact, log, port=port) as server:
        check(server, completions)
        (engine,) = (pid for pid in server.group() if "EngineCor" in Path(f"/proc/{pid}/comm").read_text())
        begin_long_request(server, completions[0])
        os.kill(engine, signal.SIGKILL)
        assert waited(lambda: server.process.poll() is not None, 60), "the server outlived its engine"
    assert listing(artifact) == before


def begin_long_request(server: Server, completion: Greedy) -> None:
    """Leaves a request running, whose first tokens have come."""
    with server.client() as client:
        name = client.models.list().data[0].id
        asked = completion.request(max_tokens=4 * FILLING_TOKENS, stream=True)
        next(iter(client.completions.create(**fields(name, asked))))
        assert server.metrics()["num_requests_running"] == 1


def check(server: Server, completions: list[Greedy]) -> None:
    answers = together(server, [completion.request() for completion in completions])
    for completion, answer in zip(completions, answers, strict=True):
        completion.check(answer.choices[0].token_ids)
