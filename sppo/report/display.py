"""Display of a run that goes on: bars on a terminal or in a notebook, else plain lines.

Rich redraws the bars from where it left the cursor. A line that reaches the same terminal by
another way moves the cursor, so the bars stay behind as dead text and the line is drawn over.
Therefore log messages take the way of the bars' own console where both share a terminal.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

_REDRAWN_EVERY_S = 0.1
"""How often bars of a notebook are redrawn, at most."""


@contextmanager
def logging_to(console: Console | None) -> Iterator[None]:
    """Show the log messages of this process within as lines of their own, above any bars.

    They go to stderr, unless that is the terminal or notebook which ``console`` draws on. A program
    that handles log messages itself goes on to do so.

    Args:
        console: of the bars; None shows nothing.
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
    """Log messages through ``console`` on a terminal that it shares with stderr, else to stderr."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message."""
        try:
            text = self.format(record)
            if self._console.is_jupyter or _stderr_shares_terminal(self._console):
                print_line(text, self._console)
            else:
                print(text, file=sys.stderr, flush=True)
        except Exception:  # as logging.StreamHandler: a message never ends a run
            self.handleError(record)


def print_line(text: str, console: Console) -> None:
    """Print ``text`` as it is; a long line is wrapped by the terminal alone, so it copies whole."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _stderr_shares_terminal(console: Console) -> bool:
    return console.is_terminal and sys.stderr.isatty()


def _is_notebook_with_widgets(console: Console) -> bool:
    """Return whether a notebook shows what is printed, and can redraw a part of it."""
    return console.is_jupyter and not console.quiet and find_spec("ipywidgets") is not None


class TrainingDisplay:
    """One line per step; below them, on a terminal or in a notebook, bars of the run and its step.

    A widget of a notebook takes all that is shown while it is redrawn, and loses it with the next
    redrawing. So no thread redraws it, but the one that prints the lines.

    Args:
        console: where to write.
        total_steps: of the run.
        first_step: steps done before.
    """

    def __init__(self, console: Console, *, total_steps: int, first_step: int) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._redraw_at_s = 0.0
        if console.is_terminal or _is_notebook_with_widgets(console):
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                console=console,
                transient=True,
                auto_refresh=not console.is_jupyter,
                redirect_stderr=_stderr_shares_terminal(console),
            )
            self._run = self._progress.add_task("run", total=total_steps, completed=first_step)
            self._step = self._progress.add_task("step", total=None)

    def __enter__(self) -> TrainingDisplay:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def step_begins(self, *, num_actions: int) -> None:
        """Begin a step of so many actions."""
        if self._progress is not None:
            self._progress.reset(self._step, total=num_actions)

    def action(self) -> None:
        """One more action of the current step begins."""
        if self._progress is not None:
            self._advance(self._progress, self._step)

    def step_done(self, line: str) -> None:
        """Print a finished step."""
        self.say(line)
        if self._progress is not None:
            self._advance(self._progress, self._run)

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        print_line(text, self._console)

    def _advance(self, progress: Progress, task: TaskID) -> None:
        """Advance a bar; on a terminal a thread of rich redraws it."""
        progress.advance(task)
        now_s = time.monotonic()
        if self._console.is_jupyter and now_s >= self._redraw_at_s:
            self._redraw_at_s = now_s + _REDRAWN_EVERY_S
            progress.refresh()
