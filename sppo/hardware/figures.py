"""Accepted ranges of the figures of a hardware description, by their unit.

The ranges admit hypothetical machines, on which something costs nothing, and refuse figures that
make predictions overflow or divide by zero. Rates in files are of real machines, and are bounded by
what these reach.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, is_dataclass

_RANGES: tuple[tuple[str, float, float], ...] = (
    ("flops_per_s", 1e-3, 1e30),
    ("bytes_per_s", 1e-3, 1e30),
    ("_s_per_byte", 0.0, 1.0),
    ("_bytes", 0, 1 << 60),
    ("_share", 0.0, 10.0),
    ("_efficiency", 1e-6, 1.0),
    ("_s", 0.0, 3600.0),
    ("elements", 1, 1 << 48),
    ("", 0, 1 << 30),
)
"""(suffix of field names, least value, largest value); the first matching suffix applies."""

_PLAUSIBLE = {"flops_per_s": 1e18, "bytes_per_s": 1e15}
"""Largest rate in a file by suffix of the field name: a hundred times those of the fastest GPU."""


def check_plausible(spec: object, *, where: str = "") -> None:
    """Raise ValueError if a rate of a dataclass, or of one in its fields, is of no real machine.

    Args:
        spec: Dataclass instance to check.
        where: Name of the instance in messages, with a dot behind it.
    """
    for field in fields(spec):  # type: ignore[arg-type]
        value, name = getattr(spec, field.name), f"{where}{field.name}"
        if is_dataclass(value):
            check_plausible(value, where=f"{name}.")
        for index, part in enumerate(value if isinstance(value, tuple) else ()):
            if is_dataclass(part):
                check_plausible(part, where=f"{name}[{index}].")
        most = next((most for end, most in _PLAUSIBLE.items() if name.endswith(end)), None)
        if most is not None and isinstance(value, int | float) and value > most:
            raise ValueError(f"{name} is {value:.6g}: no machine reaches that; at most {most:g}")


def check_figures(spec: object, *, where: str, above_zero: Sequence[str] = ()) -> None:
    """Raise ValueError if a numeric field of a dataclass is outside the range of its unit.

    Args:
        spec: Dataclass instance to check; fields that are not numbers are ignored.
        where: Name of the instance in messages.
        above_zero: Names of fields that must not be 0; all other fields may also be 0.

    Raises:
        ValueError: A number outside the range of its unit; the message names the range.
    """
    for field in fields(spec):  # type: ignore[arg-type]
        value = getattr(spec, field.name)
        if isinstance(value, int | float):
            _check(value, name=field.name, where=where, above_zero=field.name in above_zero)


def _check(value: float, *, name: str, where: str, above_zero: bool) -> None:
    shown = f"hardware {where}.{name} is {value if math.isnan(value) else f'{value:.6g}'}"
    if not value >= 0:
        raise ValueError(f"{shown}: must be at least 0")
    if value == 0:
        if above_zero:
            raise ValueError(f"{shown}: must be above 0")
        return
    least, most = next((low, high) for end, low, high in _RANGES if name.endswith(end))
    if not least <= value <= most:
        raise ValueError(f"{shown}: must be from {least:g} to {most:g}")
