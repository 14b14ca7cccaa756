"""Checks of single configuration values: each returns the value, typed, or says what the key should hold."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from nxdi_qwen.modeling.errors import InputError


def shown(value: Any) -> str:
    """`value` as it appears in an error: on one line, shortened to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def integer(key: str, value: Any, minimum: int = 1) -> int:
    """An integer of at least `minimum`; a boolean is not one. Raises InputError."""
    if type(value) is not int or value < minimum:
        raise InputError(f"{key} must be an integer of at least {minimum}, got {shown(value)}")
    return value


def number(key: str, value: Any, *, above: float | None = None, minimum: float | None = None) -> float:
    """A finite number, strictly greater than `above` and at least `minimum` where given. Raises InputError."""
    bounds = [f" greater than {above:g}"] if above is not None else []
    bounds += [f" of at least {minimum:g}"] if minimum is not None else []
    try:
        valid = type(value) in (int, float) and math.isfinite(float(value))
    except OverflowError:  # an integer beyond every float
        valid = False
    if not valid or (above is not None and value <= above) or (minimum is not None and value < minimum):
        raise InputError(f"{key} must be a finite number{' and'.join(bounds)}, got {shown(value)}")
    return float(value)


def boolean(key: str, value: Any) -> bool:
    """True or False. Raises InputError."""
    if type(value) is not bool:
        raise InputError(f"{key} must be true or false, got {shown(value)}")
    return value


def one_of(key: str, value: Any, accepted: Collection[str]) -> str:
    """One of the `accepted` strings. Raises InputError."""
    if not isinstance(value, str) or value not in accepted:
        raise InputError(f"{key} must be one of {', '.join(accepted)}, got {shown(value)}")
    return value


def multiple_of(key: str, value: int, divisor_key: str, divisor: int) -> None:
    """Raises InputError unless `divisor` divides `value`."""
    if value % divisor:
        raise InputError(f"{key} must be a multiple of {divisor_key}, got {value} and {divisor}")
