"""What Hugging Face 5.24.0 computes in float32 for the served checkpoints, and how a server's answers compare with it.

`python -m tests.serving.references` writes `build/serving`; nothing here needs transformers or vLLM.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

FOLDER = Path(__file__).parents[2] / "build" / "serving"
COMMAND = "make build/serving/.made"
# One of each family, in the forms in which the models are published: the text alone, and the language model of a
# multimodal one. Then the architectures that are left, and a model of another kind.
FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
TEXT_FORMS = ("qwen3_5_text", "qwen3_5_moe_text")
LLAMA = "llama"
SLOTS, MAX_LENGTH, BUCKETS = 8, 768, (64, 256)
PROCESSES = 2  # that write the folder
NEAR_TIE, NEAR_TIES_ALLOWED = 1e-4, 0.01


def checkpoint(name: str) -> Path:
    return FOLDER / "models" / name


def artifact(name: str) -> Path:
    return FOLDER / "artifacts" / name


@dataclass(frozen=True)
class Greedy:
    """A greedy completion.

    prompt, tokens: ids. margins: of each choice, the largest score less the second, over the largest |score|.
    finish_reason: "length" after all that were asked for; "stop" after an end token, which is the last of `tokens`.
    asked: the request's other fields, as the completions endpoint takes them.
    """

    prompt: list[int]
    tokens: list[int]
    margins: list[float]
    finish_reason: str
    asked: dict[str, Any]

    @property
    def certain(self) -> int:
        """How many tokens stand before the first near tie."""
        return next((place for place, margin in enumerate(self.margins) if margin < NEAR_TIE), len(self.tokens))

    def request(self, **more: Any) -> dict[str, Any]:
        """The fields of the request whose answer this is."""
        return {"prompt": self.prompt, "max_tokens": len(self.tokens), "temperature": 0.0, **self.asked, **more}

    def check(self, tokens: Sequence[int], finish_reason: str | None = None, whole: bool = True) -> None:
        """Asserts that `tokens` are these up to the first near tie. `whole`: not only the beginning of them."""
        assert len(tokens) <= len(self.tokens) or self.certain < len(self.tokens), "more tokens than asked for"
        count = min(self.certain, len(tokens))
        if self.certain == len(self.tokens):
            assert not whole or len(tokens) == len(self.tokens), f"{len(tokens)} of {len(self.tokens)} tokens"
            assert finish_reason in (None, self.finish_reason), f"{finish_reason}, not {self.finish_reason}"
        for place, (actual, expected) in enumerate(zip(tokens[:count], self.tokens[:count], strict=True)):
            assert actual == expected, (
                f"prompt of {len(self.prompt)}: token {place} is {actual}, Hugging Face's is {expected} "
                f"(margin {self.margins[place]:.1e})"
            )


@dataclass(frozen=True)
class Chat:
    """A conversation, the arguments of its template, the ids it is rendered to, and the answer to them."""

    messages: list[dict[str, str]]
    template_arguments: dict[str, Any]
    answer: Greedy


@dataclass(frozen=True)
class Scored:
    """A greedy completion with log probabilities: prompt_logprobs [T, V] float32 after each token of the prompt,
    output_logprobs [n, V] before each token of the output."""

    answer: Greedy
    prompt_logprobs: Tensor
    output_logprobs: Tensor


@dataclass(frozen=True)
class References:
    """Results for one checkpoint. All but `completions` and `ended` are empty where it is none of `FAMILIES`.

    completions: of mixed lengths, which no end token stops. ended: the same prompts, where one does. steered: with
    penalties, biases, a least length or forbidden tokens. constrained: structured outputs. long: one that fills a slot
    to its last token.
    """

    completions: list[Greedy]
    ended: list[Greedy]
    steered: list[Greedy]
    constrained: list[Greedy]
    long: list[Greedy]
    chats: list[Chat]
    scored: list[Scored]


@functools.cache
def references(name: str) -> References:
    """The stored results for a checkpoint. To be read only."""
    read = json.loads((FOLDER / f"{name}.json").read_text())
    logprobs = load_file(FOLDER / f"{name}.safetensors")
    plain = ("completions", "ended", "steered", "constrained", "long")
    return References(
        **{key: [Greedy(**item) for item in read[key]] for key in plain},
        chats=[Chat(item["messages"], item["template_arguments"], Greedy(**item["answer"])) for item in read["chats"]],
        scored=[
            Scored(Greedy(**item), logprobs[f"{place}.prompt"], logprobs[f"{place}.output"])
            for place, item in enumerate(read["scored"])
        ],
    )


def near_ties(completions: Iterable[Greedy]) -> float:
    """The share of positions that are near ties."""
    margins = [margin for completion in completions for margin in completion.margins]
    return sum(margin < NEAR_TIE for margin in margins) / len(margins)
