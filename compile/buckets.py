"""Buckets: the prompt lengths that context-encoding graphs are captured for, and how a prompt is cut into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.ops.gated_delta import CHUNK

_DEFAULTS = (128, 512, 2048)


@dataclass(frozen=True)
class Buckets:
    """Ascending bucket lengths in tokens, all on the grid of 64 tokens, none longer than a slot needs."""

    lengths: tuple[int, ...]

    @classmethod
    def choose(cls, max_length: int, lengths: Sequence[int] | None = None) -> Buckets:
        """The given bucket lengths, checked; without any, defaults up to `max_length`."""
        top = _on_grid(max_length)
        if lengths is None:
            lengths = sorted({min(length, top) for length in _DEFAULTS})
        if not lengths:
            raise InputError("no bucket given: name at least one length, for example --buckets 128")
        for length in lengths:
            if length <= 0 or length % CHUNK:
                raise InputError(
                    f"bucket {length} is not on the grid of {CHUNK} tokens: use {max(CHUNK, _on_grid(length))}"
                )
            if length > top:
                raise InputError(
                    f"bucket {length} is longer than the maximum length {max_length}: "
                    f"use at most {top}, or raise --max-length"
                )
        return cls(tuple(sorted(set(lengths))))

    def cuts_prompts(self, max_length: int) -> bool:
        """Whether a prompt of up to `max_length` tokens may need more than one piece."""
        return max_length > self.lengths[-1]

    def cut(self, tokens: int) -> list[tuple[int, int]]:
        """(bucket, tokens in it) of every piece of a prompt: the largest bucket as often as it is filled, then the
        smallest that holds the rest.

        All pieces but the last fill their bucket, so every cut is on the grid.
        """
        largest = self.lengths[-1]
        pieces = [(largest, largest)] * (tokens // largest)
        rest = tokens % largest
        if rest:
            pieces.append((min(length for length in self.lengths if length >= rest), rest))
        return pieces


def _on_grid(length: int) -> int:
    """`length` rounded up to the grid."""
    return -(-length // CHUNK) * CHUNK
