"""Suspected mistakes, each as the one method of the plain layer that it changes.

A mistake is the cause of a difference where the plain layer with it gives what the target gives, in every case, to
rounding.
"""

from __future__ import annotations

from nxdi_qwen.parity.mistakes import attention, common, delta_net
from nxdi_qwen.parity.mistakes.base import Mistake


def _of(module: object) -> list[type[Mistake]]:
    return [
        value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Mistake) and value is not Mistake and not name.startswith("_")
    ]


MISTAKES: tuple[type[Mistake], ...] = tuple(
    mistake for module in (delta_net, attention, common) for mistake in _of(module)
)
