"""Signals that end a process, and the exit codes that tell of them; loads no torch."""

from __future__ import annotations

import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals by which a process is asked to end."""


def stopped_exit_code(number: int) -> int:
    """Return the exit code of a process that signal ``number`` stopped, as shells have it."""
    return 128 + number


STOP_CODES = {stopped_exit_code(number): number.name for number in STOP_SIGNALS}
"""Names of the signals that ask a process to end, by the exit codes of what they ended."""


def signal_name(number: int) -> str:
    """Return e.g. SIGKILL for 9; real-time signals have no name of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
