"""What vLLM's HTTP server leaves out: unknown fields of a request are refused, and given-up requests are counted.

ASGI middleware, which `nxdi-qwen-serve` hands to vLLM's own option `--middleware`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from prometheus_client import Counter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

REQUESTS: Mapping[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
}
GIVEN_UP = Counter(
    "nxdi_qwen:requests_given_up",
    "Requests whose client went away before the answer was whole; vLLM counts them under no finished reason.",
    ["handler"],
)
REFUSED = Counter(
    "nxdi_qwen:requests_refused",
    "Requests refused for an unknown field, before vLLM's own counting.",
    ["handler"],
)


class RefuseUnknownFields:
    """Answers a request that has a field which vLLM would ignore, such as a misspelt one, with status 400."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_ours(scope):
            await self.app(scope, receive, send)
            return
        body = await Request(scope, receive).body()
        unknown = _unknown_fields(body, REQUESTS[scope["path"]])
        if unknown:
            REFUSED.labels(scope["path"]).inc()
            message = f"unknown field {', '.join(unknown)}: leave it out, or correct its name"
            error = {"message": message, "type": "BadRequestError", "param": unknown[0], "code": 400}
            await JSONResponse({"error": error}, status_code=400)(scope, receive, send)
            return
        given = False

        async def again() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, again, send)


class CountGivenUp:
    """Counts requests whose client disconnects before the last part of the answer was sent."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_ours(scope):
            await self.app(scope, receive, send)
            return
        gone = whole = False

        async def watching_receive() -> Message:
            nonlocal gone
            message = await receive()
            gone = gone or (message["type"] == "http.disconnect" and not whole)
            return message

        async def watching_send(message: Message) -> None:
            nonlocal whole
            await send(message)
            whole = whole or (message["type"] == "http.response.body" and not message.get("more_body", False))

        try:
            await self.app(scope, watching_receive, watching_send)
        finally:
            if gone:
                GIVEN_UP.labels(scope["path"]).inc()


def _is_ours(scope: Scope) -> bool:
    return scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in REQUESTS


def _unknown_fields(body: bytes, model: type[BaseModel]) -> list[str]:
    """Of a JSON object, in its order. What is no JSON object is left to vLLM, which refuses it."""
    try:
        content = json.loads(body)
    except ValueError:
        return []
    if not isinstance(content, dict):
        return []
    known = set(model.model_fields) | {field.alias for field in model.model_fields.values() if field.alias}
    return [name for name in content if name not in known]
