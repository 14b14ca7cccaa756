"""The cost of one layer of each kind as the context grows: what a constant-size state is for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import linear_regression, median

import torch
from torch import Tensor

from nxdi_qwen.compile.source import Progress
from nxdi_qwen.modeling.config import FULL_ATTENTION, LINEAR_ATTENTION
from nxdi_qwen.modeling.layers.context import Context, Way
from nxdi_qwen.modeling.model import DecoderLayer, RotaryFrequencies, text_positions
from nxdi_qwen.modeling.parallel import ParallelLayers
from nxdi_qwen.modeling.partition import SINGLE
from nxdi_qwen.modeling.presets import preset
from nxdi_qwen.modeling.state import StateDescription, describe_state

DECODE_CONTEXTS = (1, 512, 2048, 8192, 32768)
PREFILL_TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
LONGEST_REPEATED_PREFILL = 4096
# Longer prompts run in pieces of this many tokens: the largest of the CPU target's default buckets.
PIECE = 2048
_DECODE_CALLS = 20


@dataclass(frozen=True)
class Point:
    """One layer's token mixer at one context: `seconds` of a decode step with `tokens` in the slot, or of a prefill of
    `tokens` in pieces of `PIECE`, by round; `state_bytes` of a slot that holds that many.
    """

    kind: str  # "linear_attention" or "full_attention"
    phase: str  # "prefill" or "decode"
    tokens: int
    seconds: tuple[float, ...]
    state_bytes: int


@dataclass(frozen=True)
class Cost:
    """`layers`: how many of each kind the model has."""

    model: str
    dtype: str
    threads: int
    layers: dict[str, int]
    points: tuple[Point, ...]

    def curve(self, kind: str, phase: str) -> list[Point]:
        return [point for point in self.points if (point.kind, point.phase) == (kind, phase)]

    def exponents(self) -> dict[str, float]:
        """The exponent e of a fit ``seconds ~ tokens ** e``, least squares of the logarithms, of every curve."""
        return {
            f"{kind}, {phase}": _exponent(self.curve(kind, phase))
            for kind in self.layers
            for phase in ("prefill", "decode")
        }

    def attention_share(self, phase: str, tokens: int) -> float:
        """Of the time of all token mixers of the model, the part that its full-attention layers take."""
        seconds = {
            point.kind: self.layers[point.kind] * median(point.seconds)
            for point in self.points
            if (point.phase, point.tokens) == (phase, tokens)
        }
        return seconds[FULL_ATTENTION] / sum(seconds.values())


def measure_cost(name: str, rounds: int, progress: Progress) -> Cost:
    """Times the token mixers of a preset's layers, eager, in bfloat16, with random weights."""
    config = preset(name)
    kinds = (LINEAR_ATTENTION, FULL_ATTENTION)
    points: list[Point] = []
    total = len(kinds) * (len(DECODE_CONTEXTS) + len(PREFILL_TOKENS))
    for kind in kinds:
        layer = DecoderLayer(config, config.layer_types.index(kind), ParallelLayers(SINGLE), torch.bfloat16)
        mixer = layer.self_attn if layer.is_attention else layer.linear_attn
        for parameter in mixer.parameters():
            parameter.data.normal_(std=0.02)
        rope = RotaryFrequencies(config)
        for phase, sizes in (("decode", DECODE_CONTEXTS), ("prefill", PREFILL_TOKENS)):
            for tokens in sizes:
                progress("points", len(points), total)
                held = tokens if phase == "decode" else 0
                description = describe_state(config, 1, held + (1 if held else tokens), torch.bfloat16)
                state = _layer_state(description, config.layer_types.index(kind))
                call = _call(mixer, rope, config.hidden_size, Way(phase), held, tokens, state)
                points.append(
                    Point(kind, phase, tokens, _timed(call, phase, tokens, rounds), sum(x.nbytes for x in state))
                )
    progress("points", total, total)
    layers = {kind: config.layer_types.count(kind) for kind in kinds}
    return Cost(name, "bfloat16", torch.get_num_threads(), layers, tuple(points))


def _layer_state(description: StateDescription, layer: int) -> tuple[Tensor, ...]:
    tensors = [tensor for tensor in description.tensors if tensor.layer == layer]
    return tuple(torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors)


def _call(
    mixer: torch.nn.Module,
    rope: RotaryFrequencies,
    hidden: int,
    way: Way,
    held: int,
    tokens: int,
    state: tuple[Tensor, ...],
) -> Callable[[], object]:
    """One decode step behind `held` tokens, or a prefill of `tokens` in the pieces that a runtime cuts it into."""
    size = 1 if way is Way.DECODE else PIECE
    end = held + 1 if way is Way.DECODE else tokens
    pieces = []
    for begin in range(held, end, size):
        valid = torch.ones(1, min(size, end - begin), dtype=torch.bool)
        start = torch.tensor([begin])
        cos, sin = rope(text_positions(start, valid))
        ends = (valid.shape[1],)
        context = Context(way, start, valid.sum(dim=1), cos, sin, ends, torch.zeros(1, dtype=torch.int64))
        pieces.append((torch.randn(1, valid.shape[1], hidden).to(torch.bfloat16), context))

    def call() -> None:
        current = state
        for x, context in pieces:
            _, (current,) = mixer(x, current, context)

    return call


@torch.inference_mode()
def _timed(call: Callable[[], object], phase: str, tokens: int, rounds: int) -> tuple[float, ...]:
    """Seconds of one call: of a prefill by itself, of a decode step the mean of some, because it is short. A prefill of
    many tokens is measured once, cold: a first call costs little beside it.
    """
    calls = _DECODE_CALLS if phase == "decode" else 1
    if phase == "prefill" and tokens > LONGEST_REPEATED_PREFILL:
        rounds = 1
    else:
        call()
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        seconds.append((time.perf_counter() - begin) / calls)
    return tuple(seconds)


def _exponent(points: list[Point]) -> float:
    x = [math.log(point.tokens) for point in points]
    y = [math.log(median(point.seconds)) for point in points]
    return linear_regression(x, y).slope
