"""A sign of life while a command computes for seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text


@contextmanager
def working(text: str, *, says_so: bool = False) -> Iterator[None]:
    """Show `text` on stderr: a spinner on a terminal, elsewhere a line if it `says_so`."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(Text(text)):  # a machine's name may look like markup
            yield
        return
    if says_so:
        console.print(f"{text} ...", markup=False, highlight=False, soft_wrap=True)
    yield
