"""What commands print: a screen of lines and tables, JSON, and signs of life."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sppo.report.lines import print_line

_Item = TypeVar("_Item")


class Unbroken(str):
    """Line that is never broken, such as a command, which could not be copied in two lines."""


Screen = Iterator[str | Text | Table]
"""Lines and tables in the order in which they are printed."""


def emit(values: Callable[[], Any], screen: Callable[[], Screen], *, as_json: bool) -> None:
    """Print the answer of a command on standard output: one JSON object, or lines and tables."""
    if as_json:
        print_json(values())
    else:
        print_screen(screen(), Console())


def print_json(values: Any, *, indent: int | None = None) -> None:
    """Print JSON values, in one line unless there is an `indent`.

    Raises:
        ValueError: A number is NaN or infinite.
    """
    typer.echo(json.dumps(values, indent=indent, allow_nan=False))


def print_screen(screen: Screen, console: Console) -> None:
    """Print lines, which a terminal breaks between words, and tables."""
    for part in screen:
        if isinstance(part, str):
            print_line(part, console, wraps=not isinstance(part, Unbroken))
        else:
            console.print(part, highlight=False, soft_wrap=isinstance(part, Text))


def written(*files: Path | None) -> Screen:
    """Yield a line for each file that was asked for."""
    for file in files:
        if file is not None:
            yield Unbroken(f"written {file}")


def table(headings: Sequence[str], rows: Iterable[Sequence[str] | None], *, left: int = 1) -> Table:
    """Return a table with a line below its headings.

    Args:
        headings: Heading of each column.
        rows: Cells of each row; None begins a section. A row may have fewer cells than columns.
        left: Number of columns whose text begins at the left; the others are of numbers.
    """
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, heading in enumerate(headings):
        if place < left:
            made.add_column(heading, no_wrap=place == 0)
        else:
            made.add_column(heading, justify="right", overflow="fold")
    return _filled(made, rows)


def item_table(
    items: Iterable[_Item], columns: Mapping[str, Callable[[_Item], str]], *, left: int = 1
) -> Table:
    """Return a table of one row per item.

    Args:
        items: Items in order.
        columns: Functions that return the cell of an item, by the heading of the column.
        left: As in :func:`table`.
    """
    rows = ([text(item) for text in columns.values()] for item in items)
    return table(tuple(columns), rows, left=left)


def columns(rows: Iterable[Sequence[str] | None], *, right: int = 0) -> Table:
    """Return text in columns without headings, of which the first `right` end at the right."""
    made = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(right):
        made.add_column(justify="right")
    return _filled(made, rows)


def _filled(made: Table, rows: Iterable[Sequence[str] | None]) -> Table:
    for row in rows:
        if row is None:
            made.add_section()
        else:
            made.add_row(*row)
    return made


def told_in_tenths(noun: str, console: Console) -> Callable[[int, int], None]:
    """Return a function that is told how many are done, of how many, and prints ten lines at most.

    Args:
        noun: What is counted.
        console: Console to print on.
    """
    printed = 0

    def tell(done: int, total: int) -> None:
        nonlocal printed
        tenths = 10 * done // max(1, total)
        if tenths > printed:
            print_line(f"{noun} {done} of {total}", console)
            printed = tenths

    return tell


@contextmanager
def working(text: str) -> Iterator[None]:
    """Show `text` on stderr, if that is a terminal, while a command computes."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(Text(text)):  # a machine's name may look like markup
        yield
