"""Rules for the copies of a whole stage's weights and gradients that live in another tier."""

from __future__ import annotations

from sppo.schedule.actions import COMPUTE_KINDS, RESIDENT_STAGES, Action, ActionKind
from sppo.schedule.checks.violations import Violation
from sppo.schedule.schedule import Schedule

_RULE = "state order"
_READING = frozenset(COMPUTE_KINDS) - {ActionKind.W}
"""Kinds of actions that read weights."""


def state_problems(schedule: Schedule, *, rank: int) -> list[Violation]:
    """Return the violations in the copies of weights and gradients of one rank's program."""
    program = schedule.programs[rank]
    wires = {action.wire for action in program}
    found: list[Violation] = []
    if "weights" in wires:
        found += _weight_problems(program, rank=rank)
    if "gradients" in wires:
        found += _gradient_problems(program, rank=rank, last_stage=schedule.num_stages - 1)
    return found


def _weight_problems(program: tuple[Action, ...], *, rank: int) -> list[Violation]:
    """Check that compute reads only weights of the last `RESIDENT_STAGES` stages fetched."""
    held: list[int] = []
    for index, action in enumerate(program):
        if action.wire == "weights":
            held = [*held, action.stage][-RESIDENT_STAGES:]
        elif action.kind in _READING and action.stage not in held:
            text = f"{action} reads weights of stage {action.stage}, and stages {held} are here"
            return [Violation(_RULE, text, rank, index)]
    return []


def _gradient_problems(
    program: tuple[Action, ...], *, rank: int, last_stage: int
) -> list[Violation]:
    """Check that gradients are on the device before additions, and that all leave in the end."""
    gone: set[int] = set()
    here: set[int] = set()
    for index, action in enumerate(program):
        stage, text = action.stage, ""
        if action.wire == "gradients" and action.kind is ActionKind.D2H:
            if stage not in here:
                text = f"{action} takes gradients away that are not here"
            here.discard(stage)
            gone.add(stage)
        elif action.wire == "gradients":
            if stage not in gone:
                text = f"{action} brings back gradients that have not left"
            gone.discard(stage)
            here.add(stage)
        elif action.kind is ActionKind.REDUCE:
            if stage in gone:
                text = f"{action} reduces gradients that have left"
        elif action.kind in (ActionKind.B, ActionKind.W) or (
            action.kind is ActionKind.F and stage == last_stage
        ):
            if stage in gone:
                text = f"{action} adds to gradients that have left"
            here.add(stage)
        if text:
            return [Violation(_RULE, text, rank, index)]
    if here:
        text = f"gradients of stages {sorted(here)} do not leave"
        return [Violation(_RULE, text, rank, len(program) - 1)]
    return []
