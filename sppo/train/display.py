"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


class TrainingDisplay:
    """One line per step; on a terminal, below them, how far the run and its current step are.

    Args:
        console: where to write.
        total_steps: of the run.
        first_step: steps done before.
        actions_per_step: forward and backward passes of subsequences in a step.
    """

    def __init__(
        self, console: Console, *, total_steps: int, first_step: int, actions_per_step: int
    ) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._actions = actions_per_step
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                console=console,
                transient=True,
            )
            self._run = self._progress.add_task("run", total=total_steps, completed=first_step)
            self._step = self._progress.add_task("step", total=actions_per_step)

    def __enter__(self) -> TrainingDisplay:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def action(self) -> None:
        """One more action of the current step begins."""
        if self._progress is not None:
            self._progress.advance(self._step)

    def step_done(self, line: str) -> None:
        """Print a finished step and start the next one."""
        self.say(line)
        if self._progress is not None:
            self._progress.advance(self._run)
            self._progress.reset(self._step, total=self._actions)

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
