"""Sizes and durations as people write them: ``32Ki`` tokens, ``2GiB``, ``4Mi``, ``90s``, ``15m``.

Suffixes follow IEC 80000-13: ``Ki Mi Gi Ti`` are powers of 1024, ``k M G T`` powers of 1000.
A trailing ``B`` is allowed and changes nothing.
"""

from __future__ import annotations

import re
from fractions import Fraction

from sppo.quoting import quoted

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
LARGEST_SIZE = (1 << 63) - 1
"""Upper bound on counts of tokens or bytes, because arrays, files and messages use 64 bits."""

_MULTIPLIERS = {
    "": 1,
    "k": 10**3,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
}
SIZE_PATTERN = r"^\s*([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?)\s*(Ki|Mi|Gi|Ti|k|K|M|G|T|)B?\s*$"
_SIZE = re.compile(SIZE_PATTERN, re.ASCII)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
DURATION_PATTERN = r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(s|m|h|d|)\s*$"
_DURATION = re.compile(DURATION_PATTERN, re.ASCII)
_MOST_DIGITS = 40


def parse_size(text: object) -> int:
    """Return the number of tokens or bytes in ``32Ki``, ``2GiB``, ``1.5M`` or a plain number.

    Raises:
        ValueError: Text that is not a size, or a size that is negative, fractional or too large.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        if text != text or text in (float("inf"), float("-inf")):
            raise ValueError(f"{quoted(text)} is not a size; a size is finite")
        return _whole(Fraction(text), text)
    match = _SIZE.match(text) if isinstance(text, str) and len(text) <= _MOST_DIGITS else None
    if match is None:
        raise ValueError(f"{quoted(text)} is not a size; write one such as 32Ki, 2GiB or 4096")
    number, suffix = match.groups()
    return _whole(Fraction(number.replace("_", "")) * _MULTIPLIERS[suffix], text)


def parse_duration(text: object) -> float:
    """Return the seconds in ``90s``, ``15m``, ``7.9h``, ``2000d`` or a plain number.

    Raises:
        ValueError: Text that is not a duration.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return float(text)
    match = _DURATION.match(text) if isinstance(text, str) and len(text) <= _MOST_DIGITS else None
    if match is None:
        raise ValueError(f"{quoted(text)} is not a duration; write one such as 90s, 15m or 50000h")
    number, suffix = match.groups()
    return float(number) * _SECONDS[suffix]


def _whole(value: Fraction, text: object) -> int:
    if value < 0:
        raise ValueError(f"{quoted(text)} is negative; write a size such as 32Ki, 2GiB or 4096")
    if value.denominator != 1:
        raise ValueError(f"{quoted(text)} is not a whole number of units")
    if value > LARGEST_SIZE:
        raise ValueError(f"{quoted(text)} is too large; a size is below 2^63")
    return value.numerator


def format_bytes(count: int | float) -> str:
    """Return ``1536`` as ``1.5 KiB``; always in powers of 1024."""
    value = float(count)
    if abs(value) < 1023.5:
        return f"{value:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if abs(value) < 1023.95:  # 1024.0 is printed in the next unit
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def format_tokens(count: int) -> str:
    """Return ``32768`` as ``32Ki``; numbers that are not whole Ki or Mi are printed in full."""
    for suffix, size in (("Mi", MIB), ("Ki", KIB)):
        if count >= size and count % size == 0:
            return f"{count // size}{suffix}"
    return str(count)


def format_count(value: float) -> str:
    """Return ``41234`` as ``41.2k``: three digits for rates and parameter counts."""
    if abs(value) < 999.5:
        return f"{value:.0f}"
    for suffix, size in (("k", 1e3), ("M", 1e6), ("B", 1e9)):
        if abs(value) < 999.95 * size:  # 1000.0 is printed in the next unit
            return f"{value / size:.1f}{suffix}"
    return f"{value / 1e12:.1f}T"


def counted(number: int, noun: str) -> str:
    """Return ``1 rank``, ``2 ranks``, ``1,024 ranks``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_duration(seconds: float) -> str:
    """Return ``12345`` as ``3h26m``, ``75`` as ``1m15s``, ``2.345`` as ``2.35 s``."""
    if seconds < 0.99995:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 59.995:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}h{minutes:02d}m"
