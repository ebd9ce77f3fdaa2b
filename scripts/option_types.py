"""What the options of the comparisons may be: argparse calls these, and names what it refuses."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

from sppo.units import parse_size

_T = TypeVar("_T")


def positive(text: str) -> int:
    """A number from 1 on, such as ``5`` or ``16Ki``."""
    try:
        number = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is too small; write a number from 1 on")
    return number


def head_counts(text: str) -> tuple[int, int]:
    """Query and key-value heads, such as ``8/2``."""
    queries, _, kv = text.partition("/")
    counts = positive(queries), positive(kv or queries)
    if counts[0] % counts[1]:
        raise argparse.ArgumentTypeError(
            f"{counts[0]} query heads cannot share {counts[1]} key-value heads evenly; write N/K "
            "with K dividing N"
        )
    return counts


def one_of(*names: str) -> Callable[[str], str]:
    """A word of ``names``."""

    def read(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return read


def several(read: Callable[[str], _T]) -> Callable[[str], list[_T]]:
    """What ``read`` reads, between commas, each once."""
    return lambda text: list(dict.fromkeys(read(word.strip()) for word in text.split(",")))
