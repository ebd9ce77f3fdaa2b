"""SIGTERM and Ctrl-C as a wish to stop: state is saved, then the process ends by itself."""

from __future__ import annotations

import os
import signal
from types import FrameType

from sppo.parallel.job.taken_signals import signal_taken


class Interrupted(Exception):  # noqa: N818 - a wish, not an error
    """The step under way was given up because the process was asked to stop."""


class StopRequest:
    """Notes the first SIGTERM or SIGINT; a second one goes to the handler that was there before.

    Use as a context manager in the main thread; earlier handlers come back at its end.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        """The signal that came, None so far."""
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Stop between the actions of a step where that is asked for.

        Raises:
            Interrupted: a signal has come.
        """
        if self.signal_name is not None:
            raise Interrupted(self.signal_name)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is None:
            self.signal_name = signal.Signals(number).name
            signal_taken()
            return
        previous = self._previous[signal.Signals(number)]
        if callable(previous):
            previous(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
