"""Failure of a rank: how it is noticed, recorded and told.

Another rank that is lost shows as PeerLostError. Every rank writes a flight record: a small file,
mapped into memory, that says what the rank does now and survives any death but the machine's. From
these records and from how the processes ended, the launcher tells which rank broke the job.
"""

from __future__ import annotations

import mmap
import os
import re
import signal
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals by which a process is asked to end."""
_OTHER_FAILURE = 1
"""Exit code of a failure that has no code of its own, as in :mod:`sppo.cli.exit_codes`."""

# Parts of messages of torch.distributed, in lower case; it has no types for them.
_LOSS_SIGNS = (
    # gloo
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection timed out",
    "no route to host",
    "broken pipe",
    "timed out waiting",
    "application timeout caused pair closure",
    "connectfullmesh failed",
    "operation timed out",
    # the store, where the ranks meet; gloo's wait, too
    "wait timeout",
    "connection was likely closed",
    "timed out after",
    "failed to connect/validate",
    "has timed out",
    # NCCL
    "ncclremoteerror",
    "remote process exited",
    "closed by remote peer",
    "collective operation timeout",
    "communicator was aborted",
)
_PLACE_IN_SOURCE = re.compile(r"^\[\S+:\d+\]\s*")
_TIMEOUT = re.compile(r"(?:timed out waiting|wait timeout after) (\d+)ms.*", re.IGNORECASE)
"""Timeouts of gloo for a message and of the store for a key."""
_CLOSED_AFTER_TIMEOUT = "application timeout caused pair closure"
"""Message of gloo for a connection on which a wait of this process has run out before."""
_ADVICE = re.compile(r"\. This is typically caused by.*$")


class PeerLostError(RuntimeError):
    """Another rank ended, or did not answer in time: not this rank's fault."""


@contextmanager
def peer_errors(what: str) -> Iterator[None]:
    """Turn torch's errors for a lost connection or a timeout within into PeerLostError.

    Args:
        what: is done, e.g. "waiting for 0SEND_ACT0.3 from rank 0".

    Raises:
        PeerLostError: says ``what``, and in a line what torch said.
    """
    try:
        yield
    except PeerLostError:
        raise
    except RuntimeError as error:
        reason = loss_in(error)
        if reason is None:
            raise
        raise PeerLostError(f"{what}: {reason}") from error


def loss_in(error: RuntimeError) -> str | None:
    """Return in one line why a peer is lost; None if an error of torch means something else."""
    for line in str(error).splitlines():
        if not any(sign in line.lower() for sign in _LOSS_SIGNS):
            continue
        if _CLOSED_AFTER_TIMEOUT in line.lower():
            return "timed out before, and closed the connection then"
        reason = _ADVICE.sub("", _PLACE_IN_SOURCE.sub("", line.strip()))
        return _TIMEOUT.sub(lambda match: f"timed out after {int(match[1]) / 1000:g} s", reason)
    return None


RankState = Literal["starting", "running", "waiting_for_peer", "failed", "peer_lost", "done"]
_STATES: tuple[RankState, ...] = get_args(RankState)
_CODES = {state: code for code, state in enumerate(_STATES)}

_ACTION_BYTES = 48
_MESSAGE_BYTES = 400
_TURN = struct.Struct("Q")
"""Number of changes so far; its remainder by the number of copies is the index of the latest."""
_RECORD = struct.Struct(f"=dqqqB{_ACTION_BYTES}s{_MESSAGE_BYTES}s")
"""Time, step, position, number of actions, state, action, message."""
_NUM_COPIES = 16
_COPY_BYTES = 512
_STARTS = tuple(64 + index * _COPY_BYTES for index in range(_NUM_COPIES))
_FILE_BYTES = 64 + _NUM_COPIES * _COPY_BYTES
assert _RECORD.size <= _COPY_BYTES, "copies overlap"
_READ_ATTEMPTS = 100


@dataclass(frozen=True, slots=True)
class ProgressNote:
    """The last entry of a flight record.

    Attributes:
        state: What the rank was about.
        step: The training step, None before the first.
        position: Of the action in its program of this step, from 0.
        num_actions: Of that program.
        action: Text of the action.
        changed_s: When, on the clock of ``time.monotonic``, the same for all processes of a
            machine.
        message: Why it failed, if it did.
    """

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
    """Writes the flight record of one rank, without a system call; for one thread.

    Changes go round among copies of the record, and a number says which copy is the latest, so
    neither a reader nor a death halfway meets half a record.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        """Use :meth:`create`."""
        self._memory = memory
        # A memoryview stores a number at once; struct would write zeros first.
        self._turns = memoryview(memory)[: _TURN.size].cast("Q")
        self._turn = self._turns[0]
        self._step = -1
        self._position = 0
        self._num_actions = 0
        self._action = b""
        self._failed_s: float | None = None
        self.state("starting")

    @classmethod
    def create(cls, path: Path | None) -> RankProgress:
        """Make the file, or continue the one that exists; None makes a record that nobody reads.

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
        """Record that an action begins; takes less than a microsecond.

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
        self.state("running")

    def state(self, state: RankState, *, message: str = "") -> None:
        """Record another state of the rank within the same action."""
        self._failed_s = None
        self._write(state, message=message, at_s=time.monotonic())

    def failed(self, error: BaseException) -> None:
        """Record what ends the rank; when it is told again, on its way out, the time stays."""
        at_s = time.monotonic() if self._failed_s is None else self._failed_s
        self._write(_state_after(error), message=_message_of(error), at_s=at_s)
        self._failed_s = at_s

    def _write(self, state: RankState, *, message: str, at_s: float) -> None:
        turn = self._turn + 1
        _RECORD.pack_into(
            self._memory,
            _STARTS[turn % _NUM_COPIES],
            at_s,
            self._step,
            self._position,
            self._num_actions,
            _CODES[state],
            self._action,
            message.encode(),
        )
        self._turns[0] = self._turn = turn

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Record why the code within ends, if it fails: with a message, or by a lost peer."""
        try:
            yield
        except BaseException as error:
            self.failed(error)
            raise

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Record how the code within ends: done, failed with a message, or by a lost peer."""
        with self.failing():
            yield
        self.state("done")


def read_progress(path: Path) -> ProgressNote | None:
    """Return the last whole entry of a flight record, None if its rank has not written one.

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
        return _last_note(descriptor)
    finally:
        os.close(descriptor)


def _last_note(descriptor: int) -> ProgressNote | None:
    """Read the latest copy, again if the writer has come round to it meanwhile."""
    turn, record = 0, b""
    for _ in range(_READ_ATTEMPTS):
        turn = _read_turn(descriptor)
        record = os.pread(descriptor, _RECORD.size, _STARTS[turn % _NUM_COPIES])
        # The copy after the last finished one may be half written.
        if 0 <= _read_turn(descriptor) - turn < _NUM_COPIES - 1:
            break
    if not turn:
        return None
    changed_s, step, position, num_actions, code, action, message = _RECORD.unpack(record)
    return ProgressNote(
        state=_STATES[min(code, len(_STATES) - 1)],
        step=step if step >= 0 else None,
        position=position,
        num_actions=num_actions,
        action=_text(action),
        changed_s=changed_s,
        message=_text(message),
    )


def _read_turn(descriptor: int) -> int:
    (turn,) = _TURN.unpack(os.pread(descriptor, _TURN.size, 0))
    return int(turn)


def _text(field: bytes) -> str:
    """Decode a field without its padding, and without the half of a character that was cut."""
    return field.rstrip(b"\0").decode(errors="ignore")


def _state_after(error: BaseException) -> RankState:
    if isinstance(error, PeerLostError):
        return "peer_lost"
    # Of SystemExit, or of the exit of a command line library.
    code = error.code if isinstance(error, SystemExit) else getattr(error, "exit_code", 1)
    return "done" if code in (0, None) else "failed"


def _message_of(error: BaseException) -> str:
    """Return the text of an error, "" for an exit, before which the reason was printed."""
    if isinstance(error, SystemExit) or hasattr(error, "exit_code"):
        return ""
    if isinstance(error, ValueError | OSError | PeerLostError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def stopped_exit_code(number: int) -> int:
    """Return the exit code of a process that signal ``number`` stopped, as shells have it."""
    return 128 + number


STOP_CODES = {stopped_exit_code(number): number.name for number in STOP_SIGNALS}
"""Names of the signals that ask a process to end, by the exit codes of what they ended."""

_NOTABLE_STILLNESS_S = 1.0

_STATE_TEXTS: dict[RankState, str] = {
    "starting": "was starting",
    "running": "was running",
    "waiting_for_peer": "was waiting for another rank",
    "failed": "failed",
    "peer_lost": "lost another rank",
    "done": "was done",
}


@dataclass(frozen=True, slots=True)
class RankEnd:
    """End of one rank's process.

    Attributes:
        rank: Its number.
        returncode: As :class:`subprocess.Popen` has it: minus the signal that killed it.
        ended_s: When that was seen, on the clock of ``time.monotonic``.
        stopped: Whether it was told to end because another rank had failed before.
        note: The last entry of its flight record, None if there is none.
        last_lines: Of its output, where that has not been seen.
        collective_timed_out: Whether NCCL's watchdog says in its output that it ended the rank;
            None where the output was not kept.
    """

    rank: int
    returncode: int
    ended_s: float
    stopped: bool
    note: ProgressNote | None
    last_lines: tuple[str, ...] = ()
    collective_timed_out: bool | None = None

    @property
    def failed_s(self) -> float:
        """Return when it failed: by its flight record, else when it ended, which takes a while."""
        if self.note is not None and self.note.state in ("failed", "peer_lost"):
            return min(self.note.changed_s, self.ended_s)
        return self.ended_s

    @property
    def still_s(self) -> float:
        """Seconds from the last entry of its flight record to its end; 0 if there is none."""
        return 0.0 if self.note is None else self.ended_s - self.note.changed_s

    @property
    def message(self) -> str:
        """First line of the message in its flight record, "" if there is none."""
        lines = self.note.message.splitlines() if self.note is not None else []
        return lines[0] if lines else ""

    @property
    def distance(self) -> int:
        """Distance from the cause: 0 may be the cause, 1 was aborted, 2 lost a peer, 3 was stopped.

        A rank that aborts without having failed was most likely ended by NCCL's watchdog, because
        another rank does not answer; it may have been an assertion of a library, though.
        """
        if self.stopped:
            return 3
        if self.note is not None and self.note.state == "peer_lost":
            return 2
        return 1 if self.was_aborted else 0

    @property
    def was_aborted(self) -> bool:
        """Return whether a library ended the process by SIGABRT before the rank had failed."""
        failed = self.note is not None and self.note.state == "failed"
        return self.returncode == -signal.SIGABRT and not failed

    @property
    def timeout(self) -> str | None:
        """The timeout that ended it, e.g. ``timed out after 8 s``, None if none did.

        Without the seconds if it used a connection that an earlier wait of its own had given up.
        """
        if self.was_aborted and self.collective_timed_out:
            return "timed out in NCCL"
        if self.note is None or self.note.state != "peer_lost":
            return None
        found = re.search(r"timed out( after [\d.]+ s)?", self.message)
        return found and found[0]


def first_failure(ends: Sequence[RankEnd]) -> RankEnd | None:
    """Return the rank to blame, None if all ended well.

    Ranks that failed by themselves come before those that were aborted, these before those that
    lost another one, these before those that were stopped; among equals the earliest.
    """
    failed = [end for end in ends if end.returncode != 0]
    return min(failed, key=lambda end: (end.distance, end.failed_s), default=None)


def exit_code(end: RankEnd, *, asked: Sequence[str] = ()) -> int:
    """Return the exit code of the job: that of the rank to blame, 1 if a signal killed it.

    Args:
        end: of the rank to blame.
        asked: names of the signals by which the user had asked for the end. If the rank did not
            fail by itself, the code is 128 + the number of the first of them.
    """
    failed_itself = end.returncode > 0 and end.distance == 0
    if asked and not failed_itself:
        return stopped_exit_code(signal.Signals[asked[0]])
    return end.returncode if end.returncode > 0 else _OTHER_FAILURE


def was_said_by_rank_0(ends: Sequence[RankEnd]) -> bool:
    """Return whether rank 0, whose output is seen, has said the one reason why all ranks ended.

    That is so if all of them refused the same, or if all ended because a signal asked them.
    """
    codes = {end.returncode for end in ends}
    if codes <= {0, *STOP_CODES}:
        return ends[0].returncode != 0
    messages = {end.message for end in ends}
    return len(codes) == len(messages) == 1 and min(codes) > _OTHER_FAILURE and messages != {""}


def failure_report(
    ends: Sequence[RankEnd], *, first: RankEnd, asked: Sequence[str], dumps: Sequence[Path] = ()
) -> str:
    """Return what happened, the rank to blame first, for a terminal.

    Args:
        ends: of all ranks.
        first: the one to blame.
        asked: names of the signals by which the user had asked for the end.
        dumps: files in which NCCL has left what it was about.
    """
    return "\n".join([*_failure_lines(ends, first=first, asked=asked), *_dump_lines(dumps)])


def _dump_lines(dumps: Sequence[Path]) -> list[str]:
    if not dumps:
        return []
    names = ", ".join(path.name for path in dumps)
    return [f"  what NCCL was about (torchfrtrace reads it): {names} in {dumps[0].parent}"]


def _failure_lines(ends: Sequence[RankEnd], *, first: RankEnd, asked: Sequence[str]) -> list[str]:
    after = f"after {' and '.join(asked)}, " if asked else ""
    hung = _unanswering(ends)
    if hung is not None:
        told = [_other(end) for end in ends if end is not hung]
        return [f"error: {after}{_did_not_answer(hung, ends)}", *told]
    lines = [f"error: {after}rank {first.rank} of {len(ends)} {_how(first)}{_where(first)}"]
    if first.message and not any(first.message in line for line in first.last_lines):
        lines.append(f"  {first.message}")
    if first.last_lines:
        lines.append(f"  its last {len(first.last_lines)} lines of output:")
        lines += [f"  | {line}" for line in first.last_lines]
    return lines + [_other(end) for end in ends if end is not first]


def _unanswering(ends: Sequence[RankEnd]) -> RankEnd | None:
    """Return the rank that others waited for until they timed out, None: they ended otherwise.

    It neither failed nor waited long enough to give up itself: of the ranks that had to be ended it
    has not moved for the longest time, since before the first of the others gave up.
    """
    lost = [end for end in ends if end.timeout is not None]
    crashed = (end.was_aborted and end.collective_timed_out is False for end in ends)
    if not lost or any(end.returncode and end.distance == 0 for end in ends) or any(crashed):
        return None
    gave_up_s = min(end.failed_s for end in lost)
    still = [(end.note.changed_s, end) for end in ends if end.stopped and end.note is not None]
    changed_s, hung = min(still, key=lambda found: found[0], default=(gave_up_s, ends[0]))
    return hung if changed_s < gave_up_s else None


def _did_not_answer(hung: RankEnd, ends: Sequence[RankEnd]) -> str:
    waited = min((end for end in ends if end.timeout is not None), key=lambda end: end.failed_s)
    assert hung.note is not None, "a rank without a note is never blamed for not answering"
    return (
        f"rank {hung.rank} of {len(ends)} did not answer, and rank {waited.rank} {waited.timeout}: "
        f"rank {hung.rank} {_STATE_TEXTS[hung.note.state]}{_where(hung)}, for {hung.still_s:.0f} s"
    )


def _how(end: RankEnd) -> str:
    if end.returncode in STOP_CODES:
        return f"was stopped by {STOP_CODES[end.returncode]}"
    if end.returncode >= 0:
        return f"ended with exit code {end.returncode}"
    name = signal_name(-end.returncode)
    if name == "SIGKILL" and not end.stopped:
        return "was killed by SIGKILL, which is also what a system short of memory sends,"
    if end.was_aborted and end.collective_timed_out:
        return "was ended by NCCL, whose work did not end in time,"
    return f"was killed by {name}"


def _where(end: RankEnd) -> str:
    if end.note is None:
        return " before it could say anything"
    place = end.note.place()
    return f" {place}" if place.startswith("before") else f" at {place}"


def _other(end: RankEnd) -> str:
    """Return a line for a rank that is not to blame."""
    if end.returncode == 0:
        return f"  rank {end.rank} ended well"
    if end.note is None or end.was_aborted:
        return f"  rank {end.rank} {_how(end)}{_where(end)}"
    said = f": {end.message}" if end.message else ""
    if end.stopped and end.still_s >= _NOTABLE_STILLNESS_S:
        said = f", for {end.still_s:.0f} s{said}"
    return f"  rank {end.rank} {_STATE_TEXTS[end.note.state]}{_where(end)}{said}"


def signal_name(number: int) -> str:
    """Return e.g. SIGKILL for 9; real-time signals have no name of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
