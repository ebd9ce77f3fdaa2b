"""Types of the options of the comparison scripts, for argparse; errors name the refused value."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from sppo.output_file import check_new_directory, check_output_files
from sppo.units import parse_size

_T = TypeVar("_T")


def positive(text: str) -> int:
    """Return a number of at least 1, such as ``5`` or ``16Ki``."""
    try:
        number = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is too small; write a number from 1 on")
    return number


def output_file(text: str) -> Path:
    """Return the path of a file that can be written; its directory need not exist yet."""
    path = Path(text)
    try:
        if path.parent.exists():
            check_output_files({"file": path})
        else:
            check_new_directory(path)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def one_of(*names: str) -> Callable[[str], str]:
    """Return a parser of the words `names`."""

    def read(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return read


def several(read: Callable[[str], _T]) -> Callable[[str], list[_T]]:
    """Return a parser of comma-separated values that `read` parses, each once."""
    return lambda text: list(dict.fromkeys(read(word.strip()) for word in text.split(",")))
