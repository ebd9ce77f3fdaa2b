"""Parsers of finite numbers in a range, for command-line options; errors name the option."""

from __future__ import annotations

import math
from collections.abc import Callable

_LARGEST = 1e30
"""Largest accepted cost. Above it, smaller costs that are added vanish in rounding."""


def count(option: str, *, least: int = 1, most: int) -> Callable[[str], int]:
    """Return a parser of whole numbers for `option`, to be used as ``typer.Option(parser=)``.

    Args:
        option: Name of the option as it is written, such as ``--ranks``.
        least: Smallest accepted value.
        most: Largest accepted value.
    """

    def integer(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            _refuse(option, text, f"must be a whole number from {least} to {most:,}")
        return number

    return integer


def amount(option: str, *, above_zero: bool = False) -> Callable[[str], float]:
    """Return a parser of finite numbers of at least 0 for the option `option`.

    Args:
        option: Name of the option as it is written, such as ``--latency``.
        above_zero: Refuse 0 as well.
    """

    def float_(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not 0 <= number <= _LARGEST or (above_zero and number == 0):
            least = "above 0" if above_zero else "of at least 0"
            _refuse(option, text, f"must be a finite number {least}, up to {_LARGEST:g}")
        return number

    float_.__name__ = "float"  # the help shows this name as the type of the option
    return float_


def _refuse(option: str, text: str, rule: str) -> None:
    from sppo.cli.exit_codes import BAD_INPUT, fail
    from sppo.quoting import one_line

    fail(f"{option} {one_line(text)}: {rule}", code=BAD_INPUT)
