"""One decoder layer alone, in situations in which layers go wrong: what is fed, and what comes out.

Every target that can run a layer alone runs the same `LayerCase`, so that padding, continued prompts, reused slots and
idle rows are part of the comparison although each request's right answer does not depend on them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Request:
    """x: [T, H], the layer's inputs. positions: [3, T] int64, rotary positions (time, height, width)."""

    x: Tensor
    positions: Tensor


@dataclass(frozen=True)
class Call:
    """One forward pass: the next `counts[request]` tokens of each request, behind what its slot holds.

    Prefill: one row a request, padded on the right to `bucket`, then `idle_rows` rows without a token that name the
    first request's slot. Decode: one token a request, a row for every slot, those without a token idle.
    """

    counts: dict[int, int]
    bucket: int
    idle_rows: int = 0
    decode: bool = False


@dataclass(frozen=True)
class LayerCase:
    """`slots[request]`: where a request lives. A slot that is named twice is used again by the later request, which
    starts from nothing. `padding` [H]: what the layer gets at positions that hold no token.
    """

    name: str
    requests: tuple[Request, ...]
    slots: tuple[int, ...]
    calls: tuple[Call, ...]
    padding: Tensor

    @property
    def slot_count(self) -> int:
        return max(self.slots) + 1

    @property
    def max_length(self) -> int:
        """Room for the longest request."""
        return max(len(request.x) for request in self.requests) + 1


@dataclass
class RequestRun:
    """What the layer yields for one request of T tokens.

    output: [T, H]. states: after every call that the request had part in, by role: "recurrent" [Hv, dk, dv] and "conv"
    [C, K - 1], or "key" and "value" [tokens so far, Hkv, d]. intermediates: by name [T, ...], where the target shows
    them; the names are those of `plain_layer`.
    """

    output: Tensor
    states: list[dict[str, Tensor]] = field(default_factory=list)
    intermediates: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerRun:
    """One entry for each request of the case."""

    requests: tuple[RequestRun, ...]


def begins(case: LayerCase) -> list[dict[int, int]]:
    """For every call the tokens that each of its requests already has."""
    done = dict.fromkeys(range(len(case.requests)), 0)
    result = []
    for call in case.calls:
        result.append({request: done[request] for request in call.counts})
        for request, count in call.counts.items():
            done[request] += count
    return result


TOKENS = 171  # that the cases need of a source of inputs


def prompt_case(name: str, x: Tensor, tokens: int) -> LayerCase:
    """What a run feeds the layer: x [N, H], of which the first `tokens` are the prompt, the others decode steps."""
    request = Request(x, torch.arange(len(x)).expand(3, -1))
    calls = [Call({0: tokens}, tokens), *[Call({0: 1}, 1, decode=True)] * (len(x) - tokens)]
    return LayerCase(name, (request,), (0,), tuple(calls), x[len(x) // 2])


def layer_cases(x: Tensor, image_positions: bool) -> list[LayerCase]:
    """The cases for one layer, from inputs x [N, H] of any number of tokens (used again from the front if too few).

    `image_positions`: one more case, whose three position axes differ.
    """
    x = x[torch.arange(max(TOKENS, len(x))) % len(x)]
    padding = x[len(x) // 2]

    def request(first: int, count: int, positions: Tensor | None = None) -> Request:
        index = (first + torch.arange(count)) % len(x)
        return Request(x[index], torch.arange(count).expand(3, -1) if positions is None else positions)

    def case(name: str, requests: list[Request], slots: list[int], calls: list[Call]) -> LayerCase:
        return LayerCase(name, tuple(requests), tuple(slots), tuple(calls), padding)

    def decode(*requests: int) -> Call:
        return Call(dict.fromkeys(requests, 1), 1, decode=True)

    cases = [
        case("one prompt of 130 tokens, then decode", [request(0, 133)], [0], [Call({0: 130}, 130), *[decode(0)] * 3]),
        case(
            "prompts of 1, 2, 64 and 90 tokens padded to 140, then decode",
            [request(3, 4), request(50, 5), request(20, 67), request(70, 93)],
            [3, 0, 4, 1],
            [Call({0: 1, 1: 2, 2: 64, 3: 90}, 140), *[decode(0, 1, 2, 3)] * 3],
        ),
        case(
            "prompts cut after 3 and 65 tokens and continued by 70, then decode",
            [request(10, 75), request(40, 137)],
            [2, 0],
            [Call({0: 3, 1: 65}, 65), Call({0: 70, 1: 70}, 70), *[decode(0, 1)] * 2],
        ),
        case(
            "a slot given to a second request of 2 tokens, then decode",
            [request(30, 70), request(5, 5)],
            [1, 1],
            [Call({0: 70}, 70), Call({1: 2}, 2), *[decode(1)] * 3],
        ),
        case(
            "a prompt beside an idle row that names its slot, then decode",
            [request(60, 66)],
            [2],
            [Call({0: 64}, 64, idle_rows=1), *[decode(0)] * 2],
        ),
    ]
    if image_positions:
        patch = torch.arange(36)
        image = torch.stack([patch * 0, patch // 6, patch % 6]) + 20
        positions = torch.cat([torch.arange(20).expand(3, -1), image, (torch.arange(24) + 26).expand(3, -1)], dim=1)
        cases.append(case("80 tokens, 36 of them an image", [request(0, 80, positions)], [0], [Call({0: 80}, 80)]))
    return cases
