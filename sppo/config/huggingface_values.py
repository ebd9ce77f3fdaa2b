"""Typed reads from a parsed ``config.json``, with errors that name the key and the value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from sppo.quoting import quoted

Json = Mapping[str, Any]


def refusal(key: str, value: object, supported: str) -> ValueError:
    """The error for a setting that this trainer cannot represent exactly."""
    return ValueError(f"config.json has {key} {quoted(value)}; supported: {supported}")


def require(values: Json, keys: Iterable[str]) -> None:
    """Check that every one of ``keys`` is there and not null.

    Raises:
        ValueError: listing all the keys that are not.
    """
    absent = [key for key in keys if values.get(key) is None]
    if absent:
        raise ValueError(f"config.json lacks {', '.join(absent)}")


def integer(values: Json, key: str) -> int:
    """The whole number under ``key``, at least 1.

    Raises:
        ValueError: absent, another type, or below 1.
    """
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise refusal(key, value, "a whole number of at least 1")
    return value


def number(values: Json, key: str) -> float:
    """The number under ``key``, one that fits a float.

    Raises:
        ValueError: absent or another type.
    """
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise refusal(key, value, "a number")
    try:
        found = float(value)
    except OverflowError:  # a whole number of hundreds of digits
        found = math.inf
    if not math.isfinite(found):
        raise refusal(key, value, "a finite number")
    return found


def flag(values: Json, key: str) -> bool:
    """The boolean under ``key``; absent and null are false.

    Raises:
        ValueError: another type.
    """
    value = values.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise refusal(key, value, "true or false")
    return value
