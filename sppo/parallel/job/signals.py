"""Signals that end a process, and the corresponding exit codes; without torch."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that ask a process to end."""


def stopped_exit_code(number: int) -> int:
    """Return the exit code of a process stopped by signal ``number``, as shells define it."""
    return 128 + number


STOP_CODES = {stopped_exit_code(number): number.name for number in STOP_SIGNALS}
"""Names of the signals that ask a process to end, by the resulting exit code."""


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL for 9, or "signal N" if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextmanager
def held_back(numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """Block signals in this process, and in processes that start, during the context."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
