"""A server that returns twenty log probabilities: a small one over HTTP, around the eager model."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nxdi_qwen.compile.source import ModelSource
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.parity.records import Prompt, TopLogprobs
from nxdi_qwen.parity.targets.eager import EagerSide
from nxdi_qwen.parity.targets.server import BEST, ServerSide
from nxdi_qwen.scripts.logit_diff import logit_diff
from tests.artifacts import checkpoint_of
from tests.command_line import call, refused

PROMPT = Prompt("six", (5, 6, 7, 8, 5, 6))
STEPS = 4


class Server:
    """Answers as vLLM does. `scale` changes the logits; `answers` replace what it would say; `asked` are the bodies."""

    def __init__(self, side: EagerSide) -> None:
        self.side = side
        self.scale = 1.0
        self.busy = 0
        self.models: list[dict[str, Any]] = [{"id": "tiny", "max_model_len": 200}]
        self.named = "token_id:{}".format
        self.asked: list[dict[str, Any]] = []
        self.url = ""

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(body)
        prompt = Prompt("", tuple(body["prompt"]))
        run = self.side.run(prompt, None, body["max_tokens"])
        assert run.logits is not None
        logprobs = torch.log_softmax(run.logits * self.scale, dim=-1)
        tokens = [*prompt.ids, *run.forced]
        entries = [None, *(self._best(logprobs[n], tokens[n + 1], body["logprobs"]) for n in range(len(tokens) - 1))]
        first = 0 if body["echo"] else len(prompt.ids)
        return {
            "choices": [
                {
                    "logprobs": {
                        "tokens": [self.named(token) for token in tokens[first:]],
                        "top_logprobs": entries[first:],
                    }
                }
            ]
        }

    def _best(self, logprobs: Tensor, follows: int, count: int) -> dict[str, float]:
        best = {follows: logprobs[follows].item()}  # comes in any case, in front, as vLLM has it
        values, ids = logprobs.topk(count)
        best |= dict(zip(ids.tolist(), values.tolist(), strict=True))
        return {self.named(token): value for token, value in best.items()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of(tmp_path_factory, "qwen3_5")


@pytest.fixture(scope="module")
def eager(checkpoint: Path) -> EagerSide:
    side = EagerSide.of_checkpoint(ModelSource.from_checkpoint(checkpoint), "float32")
    side.longest = 200
    return side


@pytest.fixture
def server(eager: EagerSide) -> Iterator[Server]:
    served = Server(eager)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"data": served.models})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(served.completion(body))

        def _answer(self, content: dict[str, Any]) -> None:
            served.busy -= 1
            status = 503 if served.busy >= 0 else 200
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        served.url = f"http://127.0.0.1:{listening.server_address[1]}/v1"
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield served
        listening.shutdown()
        thread.join()


def test_every_position(server: Server, eager: EagerSide) -> None:
    expected = eager.run(PROMPT, None, STEPS)
    side = ServerSide(server.url, eager.config, None)
    run = side.run(PROMPT, expected.forced, STEPS)
    assert run.logits is None and run.states is None and run.top is not None and expected.logits is not None
    values, ids = torch.log_softmax(expected.logits, dim=-1).topk(BEST)
    assert torch.equal(run.top.ids, ids)
    assert torch.allclose(run.top.logprobs, values, atol=1e-5)
    assert side.run(PROMPT, None, STEPS).forced == expected.forced


def test_forced_tokens_that_are_not_the_server_s_own(server: Server, eager: EagerSide) -> None:
    own = eager.run(PROMPT, None, STEPS).forced
    forced = (own[0], *((token + 1) % eager.config.vocab_size for token in own[1:]))
    expected = eager.run(PROMPT, forced, STEPS)
    run = ServerSide(server.url, eager.config, None).run(PROMPT, forced, STEPS)
    assert run.top is not None and expected.logits is not None
    assert torch.equal(run.top.ids, expected.logits.topk(BEST).indices)


def test_which_positions_the_server_decoded(server: Server, eager: EagerSide) -> None:
    """With a server whose prompts and decode steps disagree, each position shows where it is from."""
    own = eager.run(PROMPT, None, STEPS).forced
    right = server.completion

    def other_in_decode(body: dict[str, Any]) -> dict[str, Any]:
        server.scale = 1.0 if body["echo"] else 2.0
        return right(body)

    server.completion = other_in_decode  # type: ignore[method-assign]
    side = ServerSide(server.url, eager.config, None)

    def decoded(forced: tuple[int, ...]) -> list[bool]:
        run, expected = side.run(PROMPT, forced, STEPS), eager.run(PROMPT, forced, STEPS)
        assert run.top is not None and expected.logits is not None
        values = torch.log_softmax(expected.logits, dim=-1).topk(BEST).values
        return ((run.top.logprobs - values).abs().amax(dim=1) > 1e-3).tolist()

    length = len(PROMPT.ids)
    assert decoded(own) == [length - 1 <= position < length - 1 + STEPS for position in range(length + STEPS)]
    parted = (own[0], own[1] + 1, *own[2:])
    assert decoded(parted) == [position in (length - 1, length) for position in range(length + STEPS)]


def test_a_busy_server_is_asked_again(server: Server, eager: EagerSide) -> None:
    server.busy = 2
    assert ServerSide(server.url, eager.config, None).room == 199
    server.busy = 100
    with pytest.raises(InputError, match="answers 503"):
        ServerSide(server.url, eager.config, None)


def _another(server: Server) -> None:
    server.models = [{"id": "tiny"}, {"id": "other"}]


def _by_text(server: Server) -> None:
    server.named = chr


def _larger(server: Server) -> None:
    server.named = lambda token: f"token_id:{token + 272}"


@pytest.mark.parametrize(
    ("change", "suffix", "message"),
    [
        (_another, "", "has several models: choose one by .*#tiny"),
        (_another, "#third", "has no model third: it has tiny, other"),
        (_by_text, "", "names tokens by their text"),
        (_larger, "", "has a larger vocabulary than 272: it is another model"),
        (lambda server: server.models.clear(), "", "does not answer with a list of models"),
        (lambda server: setattr(server, "completion", lambda _: {"choices": []}), "", "does not answer with log prob"),
        (lambda server: setattr(server, "completion", lambda _: {}), "", "is it an OpenAI-compatible server"),
    ],
)
def test_a_server_that_does_not_fit(
    server: Server, eager: EagerSide, change: Callable[[Server], None], suffix: str, message: str
) -> None:
    change(server)
    with pytest.raises(InputError, match=message):
        ServerSide(server.url + suffix, eager.config, None).run(PROMPT, None, STEPS)


def test_one_of_several_models(server: Server) -> None:
    _another(server)
    side = ServerSide(server.url + "#other", server.side.config, "float32")
    side.run(PROMPT, None, STEPS)
    assert {body["model"] for body in server.asked} == {"other"} and side.description.dtype == "float32"


def test_the_command(server: Server, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", checkpoint, "--cache", tmp_path, "--prompts", "repeated", "--dtype", "float32"]
    output = call(capsys, logit_diff, *arguments, "--target", f"server:{server.url}", "--json")
    report = json.loads(output.out)
    assert output.status == 0 and report["passed"], output
    assert report["prompts"][0]["compared"] == f"logprobs of the best {BEST}"
    assert any("states" in line for line in report["prompts"][0]["not_compared"])
    server.scale = 1.01
    assert call(capsys, logit_diff, *arguments, "--target", f"server:{server.url}").status == 1
    unreachable = [*arguments, "--target", "server:http://127.0.0.1:9/v1"]
    refused(capsys, logit_diff, tmp_path, unreachable, "cannot be reached")
    refused(capsys, logit_diff, tmp_path, [*arguments, "--target", "server:localhost"], "is no address of a server")


def test_absent_entries_stay_absent(server: Server, eager: EagerSide) -> None:
    full = server._best
    server._best = (
        lambda logprobs, follows, count: dict(  # type: ignore[method-assign]
            list(full(logprobs, follows, count).items())[:3]
        )
    )
    top = ServerSide(server.url, eager.config, None).run(PROMPT, None, STEPS).top
    assert isinstance(top, TopLogprobs)
    assert (top.ids[:, 3:] == -1).all() and top.logprobs[:, 3:].isnan().all() and (top.ids[:, :2] >= 0).all()
