"""Flight record of a rank: its current action, in a file that survives the process.

The file has one line, which the launcher reads once the rank has ended
(:mod:`sppo.parallel.job.failure_report`), and before it one byte, by which the launcher marks a
rank that it stops.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from sppo.parallel.job.peer_errors import PeerLostError

RankState = Literal["starting", "running", "waiting_for_peer", "failed", "peer_lost", "done"]

_MOST_CHARACTERS = 400
"""Length at which messages are cut, so that a record is written at once."""
_STOPPED_AT, _LINE_AT = 0, 1
"""Places of the byte that the launcher sets when it stops the rank, and of the line."""


@dataclass(frozen=True, slots=True)
class ProgressNote:
    """Last entry of a flight record.

    Attributes:
        state: State of the rank.
        step: Training step; None before the first.
        position: Index of the action in the rank's program, from 0.
        num_actions: Number of actions of the program.
        action: Text of the action.
        changed_s: Time of the entry on the clock of ``time.monotonic``, which all processes of a
            machine share.
        message: Reason of a failure; "" if there is none.
        reached_s: Times at which the rank reached the parts of its start, on the same clock.
    """

    state: RankState
    step: int | None = None
    position: int = 0
    num_actions: int = 0
    action: str = ""
    changed_s: float = 0.0
    message: str = ""
    reached_s: Mapping[str, float] = field(default_factory=dict)

    def place(self) -> str:
        """Return the position in the program, such as ``step 3, action 7 of 40 (0F2)``."""
        if self.step is None:
            return "before the first step"
        if not self.action:
            return f"step {self.step}"
        return f"step {self.step}, action {self.position + 1} of {self.num_actions} ({self.action})"


class RankProgress:
    """Writer of one rank's flight record; not thread-safe.

    Args:
        path: File to create, or to continue if it exists; None writes nothing.

    Raises:
        OSError: The file cannot be created.
    """

    def __init__(self, path: Path | None) -> None:
        self._descriptor = None if path is None else os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._note = ProgressNote("starting")
        self._has_failed = False
        self.state("starting")

    def note(
        self, *, step: int, position: int, action: str, num_actions: int | None = None
    ) -> None:
        """Record that an action begins; takes a few microseconds.

        Args:
            step: Training step.
            position: Index of the action in the rank's program, from 0.
            action: Text of the action.
            num_actions: Number of actions of the program; None for the number given last.
        """
        count = self._note.num_actions if num_actions is None else num_actions
        reached_s = self._note.reached_s
        self._note = ProgressNote("running", step, position, count, action, reached_s=reached_s)
        self.state("running")

    def reached(self, part: str) -> None:
        """Record that the rank has done a part of its start, when it does so for the first time."""
        if part not in self._note.reached_s:
            reached_s = {**self._note.reached_s, part: time.monotonic()}
            self._note = replace(self._note, reached_s=reached_s)
            self.state(self._note.state)

    def state(self, state: RankState, *, message: str = "") -> None:
        """Record a new state of the rank in the same action; long messages are cut."""
        self._has_failed = False
        self._write(state, message, at_s=time.monotonic())

    def failed(self, error: BaseException) -> None:
        """Record the error that ends the rank; repeated calls keep the time of the first."""
        at_s = self._note.changed_s if self._has_failed else time.monotonic()
        self._write(_state_after(error), _message_of(error), at_s=at_s)
        self._has_failed = True

    def _write(self, state: RankState, message: str, *, at_s: float) -> None:
        message = message[:_MOST_CHARACTERS]
        self._note = replace(self._note, state=state, message=message, changed_s=at_s)
        if self._descriptor is not None:
            line = json.dumps(asdict(self._note)) + "\n"
            os.pwrite(self._descriptor, line.encode(), _LINE_AT)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Record a failure of the context: an error with its message, or a lost peer."""
        try:
            yield
        except BaseException as error:
            self.failed(error)
            raise

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Record how the context ends: done, failed with a message, or by a lost peer."""
        with self.failing():
            yield
        self.state("done")


def mark_stopped(descriptor: int) -> None:
    """Mark the flight record of a rank that its launcher stops because another rank failed."""
    os.pwrite(descriptor, b"\1", _STOPPED_AT)


def is_marked_stopped(path: Path) -> bool:
    """Return whether the launcher has marked the flight record with :func:`mark_stopped`."""
    try:
        return path.read_bytes()[_STOPPED_AT:_LINE_AT] == b"\1"
    except OSError:
        return False


def read_progress(path: Path) -> ProgressNote | None:
    """Return the last entry of the flight record of a rank that has ended; None if there is none.

    Raises:
        OSError: The file exists but cannot be read.
    """
    try:
        line, end, _ = path.read_bytes()[_LINE_AT:].partition(b"\n")
    except FileNotFoundError:
        return None
    return ProgressNote(**json.loads(line)) if end else None


def _state_after(error: BaseException) -> RankState:
    if isinstance(error, PeerLostError):
        return "peer_lost"
    # The exit code of SystemExit, or of a command line library's exit exception.
    code = error.code if isinstance(error, SystemExit) else getattr(error, "exit_code", 1)
    return "done" if code in (0, None) else "failed"


def _message_of(error: BaseException) -> str:
    """Return the text of an error; "" for an exit, whose reason was printed before."""
    if isinstance(error, SystemExit) or hasattr(error, "exit_code"):
        return ""
    if isinstance(error, ValueError | OSError | PeerLostError):
        return str(error)
    return f"{type(error).__name__}: {error}"
