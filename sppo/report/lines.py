"""Lines of text on a console, which break between words on a terminal."""

from __future__ import annotations

import os
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def print_line(text: str, console: Console, *, indent: int = 0, wraps: bool = True) -> None:
    """Print text; lines longer than a terminal, or than COLUMNS, break between words.

    Args:
        text: Text of one line or more.
        console: Console to print to.
        indent: Spaces in front of what follows a break, beyond those in front of the line.
        wraps: False for a command, which could not be copied in two lines.
    """
    if wraps and (console.is_terminal or "COLUMNS" in os.environ):
        text = "\n".join(
            textwrap.fill(
                line,
                max(1, console.width),  # COLUMNS may be 0
                subsequent_indent=" " * (len(line) - len(line.lstrip()) + indent),
                break_long_words=False,
                break_on_hyphens=False,
            )
            for line in text.splitlines()
        )
    console.print(text, markup=False, highlight=False, soft_wrap=True)
