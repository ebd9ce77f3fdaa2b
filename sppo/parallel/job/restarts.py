"""Decision after a fault of a job: to start it again, without the device to blame, or to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sppo.parallel.job.exit_codes import BAD_INPUT, CORRUPTED, NO_PLAN, NO_ROOM
from sppo.parallel.job.signals import STOP_CODES

Action = Literal["restart", "leave out", "end"]

_LEFT_TO_THE_USER = {
    BAD_INPUT: "bad input is not restarted",
    NO_PLAN: "a run without a plan is not restarted",
    NO_ROOM: "a run without room is not restarted",
    **{code: f"{name} asked for the end" for code, name in STOP_CODES.items()},
}
"""Reasons by exit code of ends that another start would repeat, or that the user wants."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault that ended a job.

    Attributes:
        exit_code: Exit code of the job.
        device: Device of the rank to blame, by its number on this machine.
        step: Step of that rank; None before the first step that the job began.
        num_ranks: Number of ranks of the job.
    """

    exit_code: int
    device: int
    step: int | None
    num_ranks: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Reaction to a fault, and its reason."""

    action: Action
    reason: str


def decide(faults: Sequence[Fault], *, restarts: int, shrink: bool) -> Decision:
    """Return the reaction to the newest fault of a run.

    Args:
        faults: Faults of the run since the user started it, the newest last.
        restarts: Most times that the run is started again.
        shrink: Whether the run may go on without the device to blame.
    """
    newest, before = faults[-1], faults[:-1]
    if newest.exit_code in _LEFT_TO_THE_USER:
        return Decision("end", _LEFT_TO_THE_USER[newest.exit_code])
    if len(before) >= restarts:
        return Decision("end", f"train.restarts={restarts} allows no more")
    at = "before the first step" if newest.step is None else f"at step {newest.step}"
    is_corrupt = newest.exit_code == CORRUPTED
    repeats = bool(before) and before[-1].step == newest.step
    if not (is_corrupt or repeats):
        return Decision("restart", "from the newest checkpoint")
    reason = "its values were corrupted" if is_corrupt else f"a second fault in a row {at}"
    is_to_blame = is_corrupt or before[-1].device == newest.device
    if shrink and is_to_blame and newest.num_ranks > 1:
        return Decision("leave out", f"{reason}: goes on without device {newest.device}")
    return Decision("end", reason)
