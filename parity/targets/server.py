"""A server with OpenAI's completions endpoint, for example vLLM's: what it tells of each position are the best few
log probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.parity.records import Description, Prompt, Run, TopLogprobs
from nxdi_qwen.parity.targets.side import Side

UNKNOWN = "unknown"
USUAL_DTYPE = "bfloat16"
BEST = 20  # vLLM's own limit, --max-logprobs
_TOKEN_ID = "token_id:"
_SECONDS = 600.0  # of one answer: a long prompt waits for those of others
_ATTEMPTS = 4
_BUSY = (429, 500, 502, 503, 504)
NOTES = (
    f"the server returns the best {BEST} log probabilities: other logits, hidden states, states and experts are not "
    "there to be compared",
    "the server decodes as long as its own tokens are the forced ones; what follows is compared as part of a prompt",
)


class ServerSide(Side):
    """Two requests a prompt: the whole sequence as a prompt (echo), and the prompt with the server's own tokens."""

    def __init__(self, url: str, config: ModelConfig, dtype: str | None) -> None:
        """`url`: as in OpenAI's clients, up to /v1; `#NAME` behind it chooses among several models. `dtype`: of the
        server's computation, which it does not tell. Asks the server for its models. Raises InputError where it does
        not answer.
        """
        self._url, _, wanted = url.rstrip("/").partition("#")
        self._url = self._url.rstrip("/")
        if not self._url.startswith(("http://", "https://")):
            raise InputError(f"{url} is no address of a server: give one like http://localhost:8000/v1")
        listed = self._ask("GET", "/models")
        try:
            names = [model["id"] for model in listed["data"]]
            room = listed["data"][0].get("max_model_len") or config.max_position_embeddings
        except (KeyError, TypeError, IndexError):
            self._strange("/models", "a list of models")
        if wanted and wanted not in names:
            raise InputError(f"{self._url} has no model {wanted}: it has {', '.join(names)}")
        if not wanted and len(names) > 1:
            raise InputError(f"{self._url} has several models: choose one by {self._url}#{names[0]}")
        self._name = wanted or names[0]
        notes = NOTES if dtype else (*NOTES, f"the server's dtype is taken to be {USUAL_DTYPE}")
        description = Description("server", UNKNOWN, dtype or USUAL_DTYPE, {"model": self._name}, notes)
        super().__init__(description, config, room - 1)  # echo needs a token more

    def run(self, prompt: Prompt, forced: Sequence[int] | None, steps: int) -> Run:
        steps = steps if forced is None else len(forced)
        tokens, own = self._complete(prompt.ids, max(steps, 1), echo=False)
        forced = tokens[:steps] if forced is None else list(forced)
        # The last token of a sequence needs a token after it to be told of; it is not looked at.
        _, every = self._complete([*prompt.ids, *forced], 1, echo=True)
        total = len(prompt.ids) + steps
        if len(every) != total + 1 or len(own) < steps:
            self._strange("/completions", f"log probabilities of {total + 1} positions with echo")
        # Entry i belongs to token i: it is what the model gave after the tokens before it.
        positions = every[1:]
        for step in range(steps):
            positions[len(prompt.ids) - 1 + step] = own[step]
            if tokens[step] != forced[step]:
                break
        return Run(prompt, tuple(forced), top=_top(positions))

    def _complete(self, ids: Sequence[int], count: int, echo: bool) -> tuple[list[int], list[dict[int, float]]]:
        """The ids that a completion lists, and of each the best log probabilities."""
        answer = self._ask(
            "POST",
            "/completions",
            {
                "model": self._name,
                "prompt": list(ids),
                "max_tokens": count,
                "temperature": 0,
                "logprobs": BEST,
                "echo": echo,
                "ignore_eos": True,
                "return_tokens_as_token_ids": True,
                "return_token_ids": True,  # vLLM echoes a prompt of ids only then
            },
        )
        try:
            logprobs = answer["choices"][0]["logprobs"]
            tokens = [_id(token) for token in logprobs["tokens"]]
            best = [
                {_id(token): float(value) for token, value in (entry or {}).items()}
                for entry in logprobs["top_logprobs"]
            ]
        except (KeyError, TypeError, IndexError):
            self._strange("/completions", "log probabilities")
        except ValueError:
            raise InputError(
                f"{self._url} names tokens by their text, which does not tell them apart: use a server that knows "
                "return_tokens_as_token_ids, as vLLM does"
            ) from None
        if max(token for named in (tokens, *best) for token in named) >= self.config.vocab_size:
            raise InputError(f"{self._url} has a larger vocabulary than {self.config.vocab_size}: it is another model")
        return tokens, best

    def _ask(self, method: str, path: str, content: dict[str, Any] | None = None) -> Any:
        try:
            import httpx
            import tenacity
        except ImportError as error:
            raise InputError(f"{error.name} is not installed: pip install 'nxdi-qwen[server]'") from None

        def busy(answer: httpx.Response) -> bool:
            return answer.status_code in _BUSY

        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(_ATTEMPTS),
            wait=tenacity.wait_exponential(multiplier=0.2, max=10),
            retry=tenacity.retry_if_exception_type(httpx.TransportError) | tenacity.retry_if_result(busy),
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
        )
        timeout = httpx.Timeout(_SECONDS, connect=10.0)
        try:
            answer = retrying(httpx.request, method, self._url + path, json=content, timeout=timeout)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise InputError(f"{self._url}{path} cannot be reached ({error}): is the server running there?") from error
        if answer.status_code != httpx.codes.OK:
            raise InputError(f"{self._url}{path} answers {answer.status_code}: {answer.text[:300]}")
        try:
            return answer.json()
        except ValueError:
            self._strange(path, "JSON")

    def _strange(self, path: str, expected: str) -> NoReturn:
        raise InputError(f"{self._url}{path} does not answer with {expected}: is it an OpenAI-compatible server?")


def _id(token: str) -> int:
    """Raises ValueError for a token's text."""
    if not token.startswith(_TOKEN_ID):
        raise ValueError(token)
    return int(token.removeprefix(_TOKEN_ID))


def _top(positions: Sequence[dict[int, float]]) -> TopLogprobs:
    """The best `BEST` of each position; a server adds the token that really follows, however improbable."""
    ids = torch.full((len(positions), BEST), -1)
    logprobs: Tensor = torch.full((len(positions), BEST), torch.nan)
    for row, entry in enumerate(positions):
        best = sorted(entry.items(), key=lambda item: -item[1])[:BEST]
        for place, (token, value) in enumerate(best):
            ids[row, place], logprobs[row, place] = token, value
    return TopLogprobs(ids, logprobs)
