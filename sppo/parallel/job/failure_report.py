"""Report of a failed job: finds the rank to blame from flight records and exit codes."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sppo.parallel.job.exit_codes import BAD_INPUT, FAULT, NO_PLAN, NO_ROOM
from sppo.parallel.job.flight_record import ProgressNote, RankState
from sppo.parallel.job.signals import STOP_CODES, signal_name, stopped_exit_code

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
    """End of the process of one rank.

    Attributes:
        rank: Global rank.
        returncode: Exit code as of :class:`subprocess.Popen`: minus the signal that killed it.
        ended_s: When the launcher noticed the end, on the clock of ``time.monotonic``.
        stopped: Whether the launcher ended the process because another rank had failed.
        note: Last entry of the rank's flight record; None if there is none.
        last_lines: Last lines of the rank's output; empty if the user has seen the output.
    """

    rank: int
    returncode: int
    ended_s: float
    stopped: bool
    note: ProgressNote | None
    last_lines: tuple[str, ...] = ()

    @property
    def failed_s(self) -> float:
        """When the rank failed, or was last heard of if it was stopped; else its process's end."""
        has_failed = self.note is not None and self.note.state in ("failed", "peer_lost")
        if self.note is not None and (has_failed or self.stopped):
            return min(self.note.changed_s, self.ended_s)
        return self.ended_s

    @property
    def still_s(self) -> float:
        """Seconds from the last entry of the flight record to the end; 0 without an entry."""
        return 0.0 if self.note is None else self.ended_s - self.note.changed_s

    @property
    def message(self) -> str:
        """First line of the message in the flight record; "" if there is none."""
        lines = self.note.message.splitlines() if self.note is not None else []
        return lines[0] if lines else ""

    @property
    def distance(self) -> int:
        """Distance from the cause: 0 may be the cause, 1 was aborted, 2 lost a peer, 3 was stopped.

        A rank that was aborted before it recorded a failure was most likely ended by NCCL's
        watchdog, because another rank did not answer; a failed assertion of a library looks alike.
        """
        if self.stopped:
            return 3
        if self.note is not None and self.note.state == "peer_lost":
            return 2
        return 1 if self.was_aborted else 0

    @property
    def was_aborted(self) -> bool:
        """True if a library ended the process by SIGABRT before the rank recorded a failure."""
        failed = self.note is not None and self.note.state == "failed"
        return self.returncode == -signal.SIGABRT and not failed

    @property
    def timeout(self) -> str | None:
        """Timeout that ended the rank, such as ``timed out after 8 s``; None if none did.

        Without seconds if the rank used a connection on which an earlier wait had timed out.
        """
        if self.note is None or self.note.state != "peer_lost":
            return None
        found = re.search(r"timed out( after [\d.]+ s)?", self.message)
        return found and found[0]


def first_failure(ends: Sequence[RankEnd]) -> RankEnd | None:
    """Return the end of the rank to blame; None if all ranks succeeded.

    Ranks that failed by themselves come first, then ranks that were aborted, ranks that lost a
    peer, and ranks that were stopped; among equals, the earliest failure comes first.
    """
    failed = [end for end in ends if end.returncode != 0]
    return min(failed, key=lambda end: (end.distance, end.failed_s), default=None)


def exit_code(end: RankEnd, *, asked: Sequence[str] = ()) -> int:
    """Return the exit code of the job: that of the rank to blame, or 1 if a signal killed it.

    Args:
        end: End of the rank to blame.
        asked: Names of the signals by which the user asked the job to end. If there are any and the
            rank did not fail by itself, the exit code is 128 + the number of the first signal.
    """
    failed_itself = end.returncode > 0 and end.distance == 0
    if asked and not failed_itself:
        return stopped_exit_code(signal.Signals[asked[0]])
    return end.returncode if end.returncode > 0 else FAULT


def was_said_by_rank_0(ends: Sequence[RankEnd]) -> bool:
    """Return whether rank 0, whose output the user sees, has printed why all ranks ended.

    True if all ranks ended with the same error message and exit code, or if all ranks ended because
    of a signal that asked them to. A rank that lost another one, was stopped, or has wrong values
    says nothing.
    """
    if ends[0].distance:
        return False
    codes = {end.returncode for end in ends}
    if codes <= {0, *STOP_CODES}:
        return ends[0].returncode != 0
    messages = {end.message for end in ends}
    said_by_all = {BAD_INPUT, NO_PLAN, NO_ROOM}
    return len(codes) == len(messages) == 1 and codes <= said_by_all and messages != {""}


def failure_report(
    ends: Sequence[RankEnd], *, first: RankEnd, asked: Sequence[str], dumps: Sequence[Path] = ()
) -> str:
    """Return the text of the report for a terminal, with the rank to blame first.

    Args:
        ends: Ends of all ranks.
        first: End of the rank to blame.
        asked: Names of the signals by which the user asked the job to end.
        dumps: Dumps of NCCL's flight recorder.
    """
    lines = _failure_lines(ends, first=first, asked=asked)
    if dumps:
        names = ", ".join(path.name for path in dumps)
        lines.append(f"  what NCCL was about (torchfrtrace reads it): {names} in {dumps[0].parent}")
    return "\n".join(lines)


def _failure_lines(ends: Sequence[RankEnd], *, first: RankEnd, asked: Sequence[str]) -> list[str]:
    after = f"after {' and '.join(asked)}, " if asked else ""
    hung = unanswering(ends)
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


def unanswering(ends: Sequence[RankEnd]) -> RankEnd | None:
    """Return the rank that others waited for until they timed out; None if there is none.

    Such a rank neither failed nor timed out itself. Of the ranks that the launcher stopped, it has
    made no progress for the longest time, since before the first other rank timed out.
    """
    lost = [end for end in ends if end.timeout is not None]
    if not lost or any(end.returncode and end.distance < 2 for end in ends):
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
    return f"was killed by {name}"


def _where(end: RankEnd) -> str:
    if end.note is None:
        return " before it could say anything"
    place = end.note.place()
    return f" {place}" if place.startswith("before") else f" at {place}"


def _other(end: RankEnd) -> str:
    """Return the line of the report for a rank that is not to blame."""
    if end.returncode == 0:
        return f"  rank {end.rank} ended well"
    if end.stopped and (end.note is None or end.returncode in STOP_CODES):
        return f"  rank {end.rank} was ended after that{_where(end)}"
    if end.note is None or end.was_aborted:
        return f"  rank {end.rank} {_how(end)}{_where(end)}"
    said = f": {end.message}" if end.message else ""
    if end.stopped and end.still_s >= _NOTABLE_STILLNESS_S:
        said = f", for {end.still_s:.0f} s{said}"
    return f"  rank {end.rank} {_STATE_TEXTS[end.note.state]}{_where(end)}{said}"
