"""What commands print: lines, tables, JSON, the names of written files, and signs of life."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sppo.report.lines import print_line


class Report(Protocol):
    """Answer of a command, for programs and for people."""

    def as_json(self) -> dict[str, Any]:
        """Return the answer as JSON values."""

    def show(self, console: Console) -> None:
        """Print the answer as lines and tables."""


def emit(report: Report, *, as_json: bool) -> None:
    """Print a report on standard output: one JSON object, or lines and tables."""
    if as_json:
        print_json(report.as_json())
    else:
        report.show(Console())


def print_json(values: Any, *, indent: int | None = None) -> None:
    """Print JSON values, in one line unless there is an `indent`.

    Raises:
        ValueError: A number is NaN or infinite.
    """
    typer.echo(json.dumps(values, indent=indent, allow_nan=False))


def say(console: Console, *texts: str, wraps: bool = True) -> None:
    """Print each text as a line, see :func:`sppo.report.lines.print_line`."""
    for text in texts:
        print_line(text, console, wraps=wraps)


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


def say_written(*files: Path | None) -> None:
    """Print a line for each file that was asked for."""
    for file in files:
        if file is not None:
            typer.echo(f"written {file}")


@contextmanager
def working(text: str) -> Iterator[None]:
    """Show `text` on stderr, if that is a terminal, while a command computes."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(Text(text)):  # a machine's name may look like markup
        yield
