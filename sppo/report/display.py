"""Display of what runs: progress bars on a terminal, else plain lines.

Rich redraws the bars from the position where it left the cursor. A line written to the same
terminal by other means moves the cursor, so old bars remain as text and the line is overwritten.
Therefore log messages are printed through the console of the bars if both share a terminal.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from sppo.report.lines import for_stderr, print_line


@contextmanager
def logging_to(console: Console | None) -> Iterator[None]:
    """Print the log messages of ``sppo`` within the context, as lines above any bars.

    Does nothing if the program has set up handlers of its own.

    Args:
        console: Console of the bars; None to print no messages.
    """
    root, own = logging.getLogger(), logging.getLogger("sppo")
    if console is None or own.hasHandlers():
        yield
        return
    handler, level = LogHandler(console), own.level
    root.addHandler(handler)
    own.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        own.setLevel(level)


class LogHandler(logging.Handler):
    """Handler that prints to ``console``, among the other lines of the run.

    Warnings and errors go to stderr, unless that shares a terminal with ``console``.
    """

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one log message."""
        try:
            text = self.format(record)
            if record.levelno < logging.WARNING or _stderr_shares_terminal(self._console):
                print_line(text, self._console)
            else:
                print(for_stderr(text), file=sys.stderr, flush=True)
        except Exception:  # as in logging.StreamHandler, a message never ends a run
            self.handleError(record)


def _stderr_shares_terminal(console: Console) -> bool:
    return console.is_terminal and sys.stderr.isatty()


class Display:
    """Progress bars on a terminal; none elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                console=console,
                transient=True,
                redirect_stderr=_stderr_shares_terminal(console),
            )

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()


class TrainingDisplay(Display):
    """Lines of the steps, with progress bars of run and step below.

    Args:
        console: Console to print to.
        total_steps: Number of steps of the run.
        first_step: Number of steps done before.
    """

    def __init__(self, console: Console, *, total_steps: int, first_step: int) -> None:
        super().__init__(console)
        if self._progress is not None:
            self._run = self._progress.add_task("run", total=total_steps, completed=first_step)
            self._step = self._progress.add_task("step", total=None)

    @property
    def width(self) -> int | None:
        """Columns that a line may have; None if it is not printed to a terminal."""
        return self._console.width if self._console.is_terminal else None

    def step_begins(self, *, num_actions: int) -> None:
        """Reset the bar of the step for a step of ``num_actions`` actions."""
        if self._progress is not None:
            self._progress.reset(self._step, total=num_actions)

    def action(self) -> None:
        """Advance the bar of the step by one action."""
        if self._progress is not None:
            self._progress.advance(self._step)

    def step_done(self, line: str) -> None:
        """Print the line of a finished step, and advance the bar of the run."""
        self.say(line)
        if self._progress is not None:
            self._progress.advance(self._run)

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        print_line(text, self._console)
