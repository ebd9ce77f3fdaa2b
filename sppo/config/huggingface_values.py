"""Typed access to values of a parsed ``config.json``; errors name the key and the value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from sppo.quoting import quoted

Json = Mapping[str, Any]


def refusal(key: str, value: object, supported: str) -> ValueError:
    """Return the error for a setting that SPPO cannot represent exactly."""
    return ValueError(f"config.json has {key} {quoted(value)}; supported: {supported}")


def require(values: Json, keys: Iterable[str]) -> None:
    """Check that all `keys` are present and not null.

    Raises:
        ValueError: Keys are missing or null; the message lists all of them.
    """
    absent = [key for key in keys if values.get(key) is None]
    if absent:
        raise ValueError(f"config.json lacks {', '.join(absent)}")


def integer(values: Json, key: str) -> int:
    """Return the whole number under `key`.

    Raises:
        ValueError: The value is absent, no whole number, or below 1.
    """
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise refusal(key, value, "a whole number of at least 1")
    return value


def number(values: Json, key: str) -> float:
    """Return the number under `key` as a float.

    Raises:
        ValueError: The value is absent, no number, or not finite as a float.
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
    """Return the boolean under `key`; False if it is absent or null.

    Raises:
        ValueError: The value has another type.
    """
    value = values.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise refusal(key, value, "true or false")
    return value
