"""Faults of a job, and the decision after one: to start again, without a device, or to end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sppo.parallel.job.exit_codes import BAD_INPUT, CORRUPTED, NO_PLAN, NO_ROOM

_NOT_MENDED = {BAD_INPUT: "bad input", NO_PLAN: "the lack of a plan", NO_ROOM: "the lack of room"}
"""Faults that another start would repeat, by exit code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Fault that ended the ranks which ``sppo train`` had started."""

    time: str
    """When all ranks had ended, in UTC (ISO 8601)."""
    attempt: int
    """Number of the start of the ranks by this command, counted from 1."""
    num_ranks: int
    """Number of ranks of this start."""
    rank: int
    """Rank to blame."""
    devices: tuple[int, ...]
    """Its device, by its number among those that the command sees, or several if one of them
    computed wrong values and it cannot be told which; on a CPU the rank in a start with all."""
    step: int | None
    """Step of that rank, counted from 1; None before its first step after the start."""
    exit_code: int
    """Exit code of the ranks, which is that of the command if the run ends here."""
    asked: str | None
    """Name of the signal by which the user, or the system, asked for the end; None without one."""
    cause: str
    """First line of the report."""
    report: str
    """Whole report: the rank to blame, its place in the program, and what the other ranks did."""
    seconds: Mapping[str, float]
    """Seconds by part. Of this start, as far as rank 0 came: started (processes, libraries and
    connections), planned (checks and plan), loaded (state and checkpoint), first step. Of the
    fault: noticed (until the command knew of it) and ended (until the last rank had ended)."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Reaction to a fault."""

    action: Literal["restart", "leave out", "end"]
    """restart: the same run starts again; leave out: without the devices to blame; end: not."""
    reason: str
    """Reason of the action."""


def decide(faults: Sequence[Fault], *, restarts: int, shrink: bool) -> Decision:
    """Return the reaction to the newest fault of a run.

    Args:
        faults: Faults of the run since the user started it, the newest last.
        restarts: Most times that the run is started again.
        shrink: Whether the run may go on without the devices to blame.
    """
    newest, before = faults[-1], faults[:-1]
    if newest.asked is not None:
        return Decision("end", f"{newest.asked} asked for the end")
    if newest.exit_code in _NOT_MENDED:
        return Decision("end", f"{_NOT_MENDED[newest.exit_code]} is not mended by another start")
    if len(before) >= restarts:
        return Decision("end", f"train.restarts={restarts} allows no more")
    is_corrupt = newest.exit_code == CORRUPTED
    repeats = bool(before) and before[-1].step == newest.step
    if not (is_corrupt or repeats):
        return Decision("restart", "from the newest checkpoint, if there is one")
    at = "before the first step" if newest.step is None else f"at step {newest.step}"
    reason = "a device is not to be trusted" if is_corrupt else f"a second fault in a row {at}"
    is_to_blame = is_corrupt or before[-1].devices == newest.devices
    if shrink and is_to_blame and newest.num_ranks > len(newest.devices):
        without = f"device{'s' * (len(newest.devices) > 1)} {', '.join(map(str, newest.devices))}"
        return Decision("leave out", f"{reason}: goes on without {without}")
    return Decision("end", reason)
