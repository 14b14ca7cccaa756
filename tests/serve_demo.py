"""The serving on one screen: tiny checkpoints of all three families, compiled, served by vLLM and asked by an OpenAI
client: a completion, a stream, a chat. Every token is compared with Hugging Face's.

`make serve-demo` makes the checkpoints, the artifacts and the references before. The text is noise: the weights are
random.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.serving.server import serving
from tests.serving.stored import FAMILIES, Greedy, artifact, references
from tests.serving.traffic import fields


@dataclass(frozen=True)
class Answer:
    """prompt_tokens and tokens: how many. difference: None where all tokens are Hugging Face's."""

    family: str
    asked: str
    prompt_tokens: int
    tokens: int
    milliseconds: float
    difference: str | None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args()
    answers, starts = [], {}
    for family in FAMILIES:
        Console(stderr=True).print(f"serving {family} ...")
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, serving(artifact(family), Path(folder, "log")) as server:
            starts[family] = time.monotonic() - begin
            with server.client() as client:
                answers += ask(client, family)
    if options.json:
        print(json.dumps({"start_seconds": starts, "answers": [asdict(answer) for answer in answers]}))
    else:
        print_table(answers, starts)
    return int(any(answer.difference for answer in answers))


def ask(client: Any, family: str) -> list[Answer]:
    known = references(family)
    plain, chat = max(known.completions, key=lambda completion: completion.certain), known.chats[0]

    def complete() -> list[int]:
        return client.completions.create(**fields(family, plain.request())).choices[0].token_ids

    def stream() -> list[int]:
        chunks = client.completions.create(**fields(family, plain.request(stream=True)))
        return [token for chunk in chunks for token in chunk.choices[0].token_ids or ()]

    def converse() -> list[int]:
        answer = client.chat.completions.create(
            model=family,
            messages=chat.messages,
            temperature=0.0,
            max_completion_tokens=len(chat.answer.tokens),
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        assert answer.prompt_token_ids == chat.answer.prompt, "the chat template gave another prompt"
        return answer.choices[0].token_ids

    questions = (("completion", complete, plain), ("stream", stream, plain), ("chat", converse, chat.answer))
    return [_compared(family, what, call, expected) for what, call, expected in questions]


def _compared(family: str, what: str, call: Any, expected: Greedy) -> Answer:
    begin, tokens, difference = time.perf_counter(), [], None
    try:
        tokens = call()
        expected.check(tokens)
    except AssertionError as error:
        difference = str(error)
    milliseconds = 1e3 * (time.perf_counter() - begin)
    return Answer(family, what, len(expected.prompt), len(tokens), round(milliseconds, 1), difference)


def print_table(answers: list[Answer], starts: dict[str, float]) -> None:
    table = Table(title="Served by vLLM on the CPU, greedy, float32, against transformers")
    for heading in ("family", "started in", "asked", "prompt", "tokens", "ms", "verdict"):
        table.add_column(heading, justify="left" if heading in ("family", "asked", "verdict") else "right")
    for answer in answers:
        table.add_row(
            answer.family,
            f"{starts[answer.family]:.0f} s",
            answer.asked,
            str(answer.prompt_tokens),
            str(answer.tokens),
            f"{answer.milliseconds:.0f}",
            f"FAILED: {answer.difference}" if answer.difference else "identical",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
