"""Flight record of a rank: its current action, in a file that survives the process.

The file is small and mapped into memory, so it survives any end of the process except a crash of
the machine. The launcher reads it (:mod:`sppo.parallel.job.failure_report`).
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from sppo.parallel.job.peer_errors import PeerLostError

RankState = Literal["starting", "running", "waiting_for_peer", "failed", "peer_lost", "done"]
_STATES: tuple[RankState, ...] = get_args(RankState)
_CODES = {state: code for code, state in enumerate(_STATES, start=1)}

_ACTION_BYTES = 48
_MESSAGE_BYTES = 400
_STOPPED_AT, _RECORD_AT = 0, 8
"""Places of the byte that the launcher sets when it stops the rank, and of the record."""
_RECORD = struct.Struct(f"=dqqqB{_ACTION_BYTES}s{_MESSAGE_BYTES}s")
"""Time, step, position, number of actions, state plus 1, action, message."""
_FILE_BYTES = _RECORD_AT + _RECORD.size


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
    """

    state: RankState
    step: int | None
    position: int
    num_actions: int
    action: str
    changed_s: float
    message: str

    def place(self) -> str:
        """Return the position in the program, such as ``step 3, action 7 of 40 (0F2)``."""
        if self.step is None:
            return "before the first step"
        if not self.action:
            return f"step {self.step}"
        return f"step {self.step}, action {self.position + 1} of {self.num_actions} ({self.action})"


class RankProgress:
    """Writer of one rank's flight record, without system calls; not thread-safe."""

    def __init__(self, memory: mmap.mmap) -> None:
        """Write to mapped memory; callers use :meth:`create`."""
        self._memory = memory
        self._step = -1
        self._position = 0
        self._num_actions = 0
        self._action = b""
        self._failed_s: float | None = None
        self.state("starting")

    @classmethod
    def create(cls, path: Path | None) -> RankProgress:
        """Create the file at ``path``, or continue an existing one; None keeps the record private.

        Raises:
            OSError: The file cannot be created.
        """
        if path is None:
            return cls(mmap.mmap(-1, _FILE_BYTES))
        with path.open("a+b") as file:
            if os.fstat(file.fileno()).st_size < _FILE_BYTES:
                file.truncate(_FILE_BYTES)
            return cls(mmap.mmap(file.fileno(), _FILE_BYTES))

    def note(
        self, *, step: int, position: int, action: str, num_actions: int | None = None
    ) -> None:
        """Record that an action begins; takes less than a microsecond.

        Args:
            step: Training step.
            position: Index of the action in the rank's program, from 0.
            action: Text of the action; long texts are cut.
            num_actions: Number of actions of the program; None for the number given last.
        """
        self._step = step
        self._position = position
        self._action = action.encode()
        if num_actions is not None:
            self._num_actions = num_actions
        self.state("running")

    def state(self, state: RankState, *, message: str = "") -> None:
        """Record a new state of the rank in the same action."""
        self._failed_s = None
        self._write(state, message=message, at_s=time.monotonic())

    def failed(self, error: BaseException) -> None:
        """Record the error that ends the rank; repeated calls keep the time of the first."""
        at_s = time.monotonic() if self._failed_s is None else self._failed_s
        self._write(_state_after(error), message=_message_of(error), at_s=at_s)
        self._failed_s = at_s

    def _write(self, state: RankState, *, message: str, at_s: float) -> None:
        self._memory[_RECORD_AT:_FILE_BYTES] = _RECORD.pack(
            at_s,
            self._step,
            self._position,
            self._num_actions,
            _CODES[state],
            self._action,
            message.encode(),
        )

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
        with path.open("rb") as file:
            return os.pread(file.fileno(), 1, _STOPPED_AT) == b"\1"
    except OSError:
        return False


def read_progress(path: Path) -> ProgressNote | None:
    """Return the last entry of the flight record of a rank that has ended; None if there is none.

    Raises:
        OSError: The file exists but cannot be read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(data) < _FILE_BYTES:
        return None
    entry = _RECORD.unpack_from(data, _RECORD_AT)
    changed_s, step, position, num_actions, code, action, message = entry
    if not 1 <= code <= len(_STATES):
        return None
    return ProgressNote(
        state=_STATES[code - 1],
        step=step if step >= 0 else None,
        position=position,
        num_actions=num_actions,
        action=_text(action),
        changed_s=changed_s,
        message=_text(message),
    )


def _text(field: bytes) -> str:
    """Decode a field without its padding, and without a character that was cut in the middle."""
    return field.rstrip(b"\0").decode(errors="ignore")


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
