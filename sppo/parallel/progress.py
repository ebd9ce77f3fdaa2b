"""The flight record of one rank: what it does now, for whoever finds it dead.

A small file that the rank maps into memory and writes without a system call, so that its last
notes survive any death but that of the machine. Copies of the record take turns and a number says
which is the latest, so neither a reader nor a death in between meets half a record.
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

from sppo.parallel.peer_loss import PeerLostError

RankState = Literal["starting", "running", "waiting_for_peer", "failed", "peer_lost", "done"]
_STATES: tuple[RankState, ...] = get_args(RankState)
_CODES = {state: code for code, state in enumerate(_STATES)}

_ACTION_BYTES = 48
_MESSAGE_BYTES = 400
_TURN = struct.Struct("Q")
"""Counts changes; its remainder is the latest copy."""
_RECORD = struct.Struct(f"=dqqqqB{_ACTION_BYTES}s{_MESSAGE_BYTES}s")
"""Time, pid, step, position, number of actions, state, action, message."""
_NUM_COPIES = 16
_COPY_BYTES = 512
_STARTS = tuple(64 + index * _COPY_BYTES for index in range(_NUM_COPIES))
_FILE_BYTES = 64 + _NUM_COPIES * _COPY_BYTES
assert _RECORD.size <= _COPY_BYTES, "copies overlap"
_READ_ATTEMPTS = 100


@dataclass(frozen=True, slots=True)
class ProgressNote:
    """What a rank last said.

    Attributes:
        pid: Its process.
        state: What it was about.
        step: The training step, None before the first.
        position: Of the action in its program of this step, from 0.
        num_actions: Of that program.
        action: Text of the action.
        changed_s: When, on the clock of ``time.monotonic``, the same for all processes of a
            machine.
        message: Why it failed, if it did.
    """

    pid: int
    state: RankState
    step: int | None
    position: int
    num_actions: int
    action: str
    changed_s: float
    message: str

    def place(self) -> str:
        """Place in the program, e.g. ``step 3, action 7 of 40 (0F2)``."""
        if self.step is None:
            return "before the first step"
        if not self.action:
            return f"step {self.step}"
        return f"step {self.step}, action {self.position + 1} of {self.num_actions} ({self.action})"


class RankProgress:
    """Writes the record; one per rank, used by one thread."""

    def __init__(self, memory: mmap.mmap) -> None:
        """Use :meth:`create`."""
        self._memory = memory
        # A memoryview stores a number at once; struct would write zeros first.
        self._turns = memoryview(memory)[: _TURN.size].cast("Q")
        self._turn = self._turns[0]
        self._pid = os.getpid()
        self._step = -1
        self._position = 0
        self._num_actions = 0
        self._action = b""
        self._write(_CODES["starting"], b"")

    @classmethod
    def create(cls, path: Path | None) -> RankProgress:
        """Make the file, or take over the one that is there; None: a record that nobody reads.

        Raises:
            OSError: it cannot be made.
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
        """An action begins; takes less than a microsecond.

        Args:
            step: of training.
            position: of the action in the rank's program, from 0.
            action: its text; longer ones are cut.
            num_actions: of the program; None: as said before.
        """
        self._step = step
        self._position = position
        self._action = action.encode()
        if num_actions is not None:
            self._num_actions = num_actions
        self._write(_CODES["running"], b"")

    def state(self, state: RankState, *, message: str = "") -> None:
        """The action stays the same, but the rank waits, has failed, or is done."""
        self._write(_CODES[state], message.encode())

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Note how what is done within ends: done, failed with which message, or for a peer."""
        try:
            yield
        except BaseException as error:
            self.state(_state_after(error), message=_message_of(error))
            raise
        self.state("done")

    def _write(self, code: int, message: bytes) -> None:
        turn = self._turn + 1
        _RECORD.pack_into(
            self._memory,
            _STARTS[turn % _NUM_COPIES],
            time.monotonic(),
            self._pid,
            self._step,
            self._position,
            self._num_actions,
            code,
            self._action,
            message,
        )
        self._turns[0] = self._turn = turn


def read_progress(path: Path) -> ProgressNote | None:
    """The last whole record; None: the rank has not come to write one.

    Raises:
        OSError: the file is there but cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        if os.fstat(descriptor).st_size < _FILE_BYTES:
            return None
        return _last_record(descriptor)
    finally:
        os.close(descriptor)


def _last_record(descriptor: int) -> ProgressNote | None:
    """Read until no copy came round again meanwhile; that takes a reader that was held up."""
    turn, record = 0, b""
    for _ in range(_READ_ATTEMPTS):
        turn = _read_turn(descriptor)
        record = os.pread(descriptor, _RECORD.size, _STARTS[turn % _NUM_COPIES])
        # One more than the writer has finished may be half written.
        if 0 <= _read_turn(descriptor) - turn < _NUM_COPIES - 1:
            break
    return _note_in(record) if turn else None


def _read_turn(descriptor: int) -> int:
    (turn,) = _TURN.unpack(os.pread(descriptor, _TURN.size, 0))
    return int(turn)


def _note_in(record: bytes) -> ProgressNote:
    changed_s, pid, step, position, num_actions, code, action, message = _RECORD.unpack(record)
    return ProgressNote(
        pid=pid,
        state=_STATES[min(code, len(_STATES) - 1)],
        step=step if step >= 0 else None,
        position=position,
        num_actions=num_actions,
        action=_text(action),
        changed_s=changed_s,
        message=_text(message),
    )


def _text(field: bytes) -> str:
    """A field without its padding, and without the half of a character that was cut."""
    return field.rstrip(b"\0").decode(errors="ignore")


def _state_after(error: BaseException) -> RankState:
    if isinstance(error, PeerLostError):
        return "peer_lost"
    return "done" if _exit_code(error) in (0, None) else "failed"


def _message_of(error: BaseException) -> str:
    """Empty for an exit, before which the reason was printed."""
    if isinstance(error, SystemExit) or hasattr(error, "exit_code"):
        return ""
    if isinstance(error, ValueError | OSError | PeerLostError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _exit_code(error: BaseException) -> object:
    """Exit code of a SystemExit, or of a command line library's exit; 1 of other errors."""
    if isinstance(error, SystemExit):
        return error.code
    return getattr(error, "exit_code", 1)
