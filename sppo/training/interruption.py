"""Ends of a run before its last step: a request to stop, and values not finite or corrupted.

SIGTERM and SIGINT are such requests: the run saves its state, then exits.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


class Interrupted(Exception):  # noqa: N818 - a request, not an error
    """The running step was abandoned because the process received a signal to stop."""


class NonFiniteError(RuntimeError):
    """Training stopped because losses, gradients or the state were not finite."""


class CorruptionError(RuntimeError):
    """The device of this rank computed or kept wrong values."""


class StopRequest:
    """Record of the first SIGTERM or SIGINT; a second signal goes to the previous handler.

    Use as a context manager in the main thread; its end restores the previous handlers.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        """Name of the first signal received; None before any."""
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise Interrupted if a signal was received; called between the actions of a step.

        Raises:
            Interrupted: A signal was received.
        """
        if self.signal_name is not None:
            raise Interrupted(self.signal_name)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is None:
            self.signal_name = signal.Signals(number).name
            return
        previous = self._previous[signal.Signals(number)]
        if callable(previous):
            previous(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
