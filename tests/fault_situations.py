"""The situations in which faults show: requests in slots, in terms of what is fed when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Session(Protocol):
    """Requests in slots, teacher-forced and compared with Hugging Face at every step."""

    def begin(self, slot: int, prompt: int) -> None:
        """Give `slot` to a new request, whatever it holds. Without this, slot s serves prompt s."""

    def prefill(self, counts: dict[int, int], bucket: int | None = None, rows: int | None = None) -> None:
        """The next `counts[slot]` tokens of each slot, padded on the right; rows beyond the requests are idle."""

    def decode(self, *slots: int, steps: int) -> None:
        """That many single tokens for each of `slots`; all other slots are idle rows."""


def alone(session: Session) -> None:
    """a prompt of 130 tokens, then 24 decode steps"""
    session.prefill({0: 130})
    session.decode(0, steps=24)


def ragged(session: Session) -> None:
    """prompts of 1, 2, 64 and 130 tokens, right-padded to 171, then 24 decode steps"""
    session.prefill({3: 1, 0: 2, 4: 64, 1: 130}, bucket=171)
    session.decode(3, 0, 4, 1, steps=24)


def cut(session: Session) -> None:
    """prompts cut after 3 and 65 tokens, continued by 90 across a chunk, then 4 decode steps"""
    session.prefill({2: 3, 0: 65})
    session.prefill({2: 90, 0: 90})
    session.decode(2, 0, steps=4)


def reused_slot(session: Session) -> None:
    """a slot given to a second request of 2 tokens, then 6 decode steps"""
    session.prefill({1: 70})
    session.begin(1, prompt=3)
    session.prefill({1: 2})
    session.decode(1, steps=6)


def idle_row(session: Session) -> None:
    """a prompt beside an idle row that names its slot, then 4 decode steps"""
    session.prefill({2: 64}, rows=2)
    session.decode(2, steps=4)


def image(session: Session) -> None:
    """80 tokens, 36 of them an image: time, height and width positions differ"""
    session.prefill({0: 80})


Situation = Callable[[Session], None]
