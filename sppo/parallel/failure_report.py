"""Which rank broke a job, told from how all of its ranks ended."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from sppo.parallel.progress import ProgressNote, RankState

_OTHER_FAILURE = 1
"""Exit code of what has no code of its own, as in :mod:`sppo.cli.exit_codes`."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals by which a process is asked to end."""


def stopped_exit_code(number: int) -> int:
    """Exit code of a process that the signal ``number`` stopped, as shells have it."""
    return 128 + number


_STOP_CODES = {stopped_exit_code(number): number.name for number in STOP_SIGNALS}

_NOTABLE_STILLNESS_S = 1.0

_WORDS: dict[RankState, str] = {
    "starting": "was starting",
    "running": "was running",
    "waiting_for_peer": "was waiting for another rank",
    "failed": "failed",
    "peer_lost": "lost another rank",
    "done": "was done",
}


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank ended.

    Attributes:
        rank: Its number.
        returncode: As :class:`subprocess.Popen` has it: minus the signal that killed it.
        ended_s: When that was seen, on the clock of ``time.monotonic``.
        stopped: Whether it was told to end because another rank had failed before.
        note: The last it said, None: nothing.
        last_lines: Of its output, where that has not been seen.
    """

    rank: int
    returncode: int
    ended_s: float
    stopped: bool
    note: ProgressNote | None
    last_lines: tuple[str, ...] = ()

    @property
    def failed_s(self) -> float:
        """When it failed: ending takes a while, so its own word counts where it has given one."""
        if self.note is not None and self.note.state in ("failed", "peer_lost"):
            return min(self.note.changed_s, self.ended_s)
        return self.ended_s


def first_failure(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The rank to blame, None: all ended well.

    Ranks that failed by themselves come before those that lost another one, these before those
    that were stopped; among equals the earliest.
    """
    failed = [end for end in ends if end.returncode != 0]
    return min(failed, key=lambda end: (_distance(end), end.failed_s), default=None)


def exit_code(end: RankEnd, *, asked: Sequence[str] = ()) -> int:
    """Exit code of the whole job: that of the rank to blame, 1 for one that a signal has killed.

    Args:
        end: of the rank to blame.
        asked: names of the signals by which the user had asked for the end. What a rank did not
            fail at by itself then follows from the first of them: 128 + its number.
    """
    failed_itself = end.returncode > 0 and _distance(end) == 0
    if asked and not failed_itself:
        return stopped_exit_code(signal.Signals[asked[0]])
    return end.returncode if end.returncode > 0 else _OTHER_FAILURE


def was_said_by_rank_0(ends: Sequence[RankEnd]) -> bool:
    """Return whether rank 0, whose output is seen, has said the one reason why all ranks ended.

    That is so where all of them refused the same, and where all ended because a signal asked them.
    """
    codes = {end.returncode for end in ends}
    if codes <= {0, *_STOP_CODES}:
        return ends[0].returncode != 0
    messages = {_message(end) for end in ends}
    return len(codes) == len(messages) == 1 and min(codes) > _OTHER_FAILURE and messages != {""}


def failure_report(ends: Sequence[RankEnd], *, first: RankEnd, asked: Sequence[str]) -> str:
    """What happened, the rank to blame first, for a terminal.

    Args:
        ends: of all ranks.
        first: the one to blame.
        asked: names of the signals by which the user had asked for the end.
    """
    after = f"after {' and '.join(asked)}, " if asked else ""
    hung = _unanswering(ends)
    if hung is not None:
        told = [_other(end) for end in ends if end is not hung]
        return "\n".join([f"error: {after}{_did_not_answer(hung, ends)}", *told])
    lines = [f"error: {after}rank {first.rank} of {len(ends)} {_how(first)}{_where(first)}"]
    message = _message(first)
    if message and not any(message in line for line in first.last_lines):
        lines.append(f"  {message}")
    if first.last_lines:
        lines.append(f"  its last {len(first.last_lines)} lines of output:")
        lines += [f"  | {line}" for line in first.last_lines]
    lines += [_other(end) for end in ends if end is not first]
    return "\n".join(lines)


def _unanswering(ends: Sequence[RankEnd]) -> RankEnd | None:
    """Return the rank that others waited for until they timed out, None: they ended otherwise.

    It neither failed nor waited long enough to give up itself: of the ranks that had to be ended it
    has not moved for the longest time, since before the first of the others gave up.
    """
    lost = [end for end in ends if _timeout(end) is not None]
    if not lost or any(end.returncode and _distance(end) == 0 for end in ends):
        return None
    gave_up_s = min(end.failed_s for end in lost)
    still = [(end.note.changed_s, end) for end in ends if end.stopped and end.note is not None]
    changed_s, hung = min(still, key=lambda found: found[0], default=(gave_up_s, ends[0]))
    return hung if changed_s < gave_up_s else None


def _timeout(end: RankEnd) -> str | None:
    """Return what a rank said of the timeout that ended it, e.g. ``timed out after 8 s``.

    Without the seconds where it used a connection that an earlier wait of its own had given up.
    """
    if end.note is None or end.note.state != "peer_lost":
        return None
    found = re.search(r"timed out( after [\d.]+ s)?", _message(end))
    return found and found[0]


def _did_not_answer(hung: RankEnd, ends: Sequence[RankEnd]) -> str:
    waited = min((end for end in ends if _timeout(end) is not None), key=lambda end: end.failed_s)
    assert hung.note is not None, "a rank without a note is never blamed for not answering"
    still_s = hung.ended_s - hung.note.changed_s
    return (
        f"rank {hung.rank} of {len(ends)} did not answer, and rank {waited.rank} "
        f"{_timeout(waited)}: rank {hung.rank} {_WORDS[hung.note.state]} {_at(hung.note)}, "
        f"for {still_s:.0f} s"
    )


def _distance(end: RankEnd) -> int:
    """Return how far from the cause an end is; 0 may be the cause itself."""
    if end.stopped:
        return 2
    return 1 if end.note is not None and end.note.state == "peer_lost" else 0


def _how(end: RankEnd) -> str:
    if end.returncode in _STOP_CODES:
        return f"was stopped by {_STOP_CODES[end.returncode]}"
    if end.returncode >= 0:
        return f"ended with exit code {end.returncode}"
    name = signal_name(-end.returncode)
    if name == "SIGKILL" and not end.stopped:
        return "was killed by SIGKILL, which is also what a system short of memory sends,"
    return f"was killed by {name}"


def _where(end: RankEnd) -> str:
    return " before it could say anything" if end.note is None else f" {_at(end.note)}"


def _other(end: RankEnd) -> str:
    """A line for a rank that is not to blame."""
    if end.returncode == 0:
        return f"  rank {end.rank} ended well"
    if end.note is None:
        return f"  rank {end.rank} {_how(end)}{_where(end)}"
    said = f": {_message(end)}" if _message(end) else ""
    still_s = end.ended_s - end.note.changed_s
    if end.stopped and still_s >= _NOTABLE_STILLNESS_S:
        said = f", for {still_s:.0f} s{said}"
    return f"  rank {end.rank} {_WORDS[end.note.state]} {_at(end.note)}{said}"


def _at(note: ProgressNote) -> str:
    place = note.place()
    return place if place.startswith("before") else f"at {place}"


def _message(end: RankEnd) -> str:
    """The first line of what it said last."""
    lines = end.note.message.splitlines() if end.note is not None else []
    return lines[0] if lines else ""


def signal_name(number: int) -> str:
    """E.g. SIGKILL of 9; real-time signals have no name of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
