"""Lines of text on a console, which break between words on a terminal."""

from __future__ import annotations

import logging
import os
import sys
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_TITLE_WIDTH = 10


def print_line(text: str, console: Console, *, indent: int = 0, wraps: bool = True) -> None:
    """Print text; lines longer than a terminal, or than COLUMNS, break between words.

    Args:
        text: Text of one line or more.
        console: Console to print to.
        indent: Spaces in front of what follows a break, beyond those in front of the line.
        wraps: False for a command, which could not be copied in two lines.
    """
    if wraps and (console.is_terminal or "COLUMNS" in os.environ):
        text = _broken(text, console.width, indent=indent)
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_titled(title: str, text: str, console: Console) -> None:
    """Print a line with a title in a column of its own, beside which the text is broken."""
    print_line(f"{title:<{_TITLE_WIDTH}}{text}", console, indent=_TITLE_WIDTH)


def for_stderr(text: str) -> str:
    """Return text as it is to be written to stderr, broken between words if that is a terminal."""
    try:
        width = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return text
    return _broken(text, width, indent=2)


class StderrFormatter(logging.Formatter):
    """Formatter of log messages that are written to stderr."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the message, broken between words on a terminal."""
        return for_stderr(super().format(record))


def _broken(text: str, width: int, *, indent: int) -> str:
    """Return text whose lines are at most `width` long, unless a word is longer."""
    return "\n".join(
        textwrap.fill(
            line,
            max(1, width),  # COLUMNS may be 0
            subsequent_indent=" " * (len(line) - len(line.lstrip()) + indent),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in text.splitlines()
    )
