"""Display of measuring: a progress bar on a terminal, otherwise a line per subject."""

from __future__ import annotations

from rich.console import Console

from sppo.report.display import Display


class BenchDisplay(Display):
    """:class:`sppo.bench.timing.Watcher` that shows the progress on a console.

    Args:
        console: Console to write to.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        if self._progress is not None:
            self._task = self._progress.add_task("", total=None)

    def begin(self, subject: str, *, total: int) -> None:
        """Show the bar, or print the line, of a subject with ``total`` timings."""
        if self._progress is None:
            self._console.print(f"measuring {subject}: {total} timings", highlight=False)
        else:
            self._progress.reset(self._task, total=total, description=subject)

    def advance(self) -> None:
        """Advance the bar by one timing."""
        if self._progress is not None:
            self._progress.advance(self._task)
