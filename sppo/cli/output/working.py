"""A sign of life while a command computes for seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from sppo.report.lines import print_line


@contextmanager
def working(text: str, *, says_so: bool = False) -> Iterator[Callable[[str], None]]:
    """Show `text` on stderr: a spinner on a terminal, elsewhere a line if it `says_so`.

    Yields a function that shows another text from then on.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(Text(text)) as status:  # a machine's name may look like markup
            yield lambda text: status.update(Text(text))
        return

    def say(text: str) -> None:
        if says_so:
            print_line(f"{text} ...", console)

    say(text)
    yield say
