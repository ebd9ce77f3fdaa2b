"""Placement of the copies of weights and gradients that live in another tier between their uses.

A rank with several stages computes with one stage for a while, then with the next. A *phase* is
such a period: consecutive actions of a rank that read the weights of one stage, or add to its
gradients.

* Weights. `H2D_WEIGHTS` names a stage whose weights are copied to the device, unless they are there
  already; they stay until two other stages have been named. Each phase is preceded by the
  `H2D_WEIGHTS` of the next phase, so weights are copied one phase ahead, into the memory of the
  phase before.
* Gradients. `D2H_GRADIENTS` of a stage comes after each of its phases; the last one comes after its
  REDUCE, too. If a stage has several phases, `H2D_GRADIENTS` brings the accumulated gradients back
  before the last action of the preceding phase, when the latest D2H has freed memory for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sppo.schedule.actions import Action, ActionKind
from sppo.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Phase:
    """Consecutive uses of one stage in the program of a rank.

    Attributes:
        stage: Stage that is used.
        first: Position of the first action of the phase.
        last: Position of the last action of the phase.
    """

    stage: int
    first: int
    last: int


def place_state(schedule: Schedule, *, weights: bool, gradients: bool) -> Schedule:
    """Return `schedule` with the copies of weights and gradients that live in another tier.

    Args:
        schedule: Schedule with all actions except messages.
        weights: Whether weights live in another tier.
        gradients: Whether gradients live in another tier.

    Raises:
        ValueError: A schedule that cuts units (MSP), whose shards fetch weights themselves.
    """
    if not weights and not gradients:
        return schedule
    for action in (a for program in schedule.programs for a in program):
        if action.num_shards > 1:
            raise ValueError(
                f"{action} is a shard of a unit, and ranks that share units have weights and "
                "gradients on the device: write state.weights=device and state.gradients=device, "
                "or parallel.multiplexed=off"
            )
    last_stage = schedule.num_stages - 1
    programs = []
    for program in schedule.programs:
        before: dict[int, list[Action]] = {}
        behind: dict[int, list[Action]] = {}
        if weights:
            _place_weights(program, before)
        if gradients and schedule.is_training:
            _place_gradients(program, before, behind, last_stage=last_stage)
        programs.append(_merged(program, before, behind))
    return replace(schedule, programs=tuple(programs))


def weight_phases(program: Sequence[Action]) -> list[Phase]:
    """Return the phases in which a rank reads weights, in order."""
    reading = (ActionKind.F, ActionKind.KV, ActionKind.B)
    return _phases(program, lambda action: action.kind in reading)


def gradient_phases(program: Sequence[Action], *, last_stage: int) -> list[Phase]:
    """Return the phases in which a rank adds to gradients, in order.

    Args:
        program: Program of the rank.
        last_stage: Last stage of the pipeline, whose forwards form the gradients of the head.
    """
    return _phases(
        program,
        lambda action: (
            action.kind in (ActionKind.B, ActionKind.W)
            or (action.kind is ActionKind.F and action.stage == last_stage)
        ),
    )


def _phases(program: Sequence[Action], uses: Callable[[Action], bool]) -> list[Phase]:
    found: list[Phase] = []
    for index, action in enumerate(program):
        if not uses(action):
            continue
        if found and found[-1].stage == action.stage:
            found[-1] = replace(found[-1], last=index)
        else:
            found.append(Phase(action.stage, index, index))
    return found


def _place_weights(program: Sequence[Action], before: dict[int, list[Action]]) -> None:
    phases = weight_phases(program)
    if not phases:
        return
    named = before.setdefault(phases[0].first, [])
    named.append(Action(ActionKind.H2D, phases[0].stage, wire="weights"))
    for phase, following in zip(phases, phases[1:], strict=False):
        fetch = Action(ActionKind.H2D, following.stage, wire="weights")
        before.setdefault(phase.first, []).append(fetch)


def _place_gradients(
    program: Sequence[Action],
    before: dict[int, list[Action]],
    behind: dict[int, list[Action]],
    *,
    last_stage: int,
) -> None:
    reduced_at = {a.stage: i for i, a in enumerate(program) if a.kind is ActionKind.REDUCE}
    phases = gradient_phases(program, last_stage=last_stage)
    final = {phase.stage: phase for phase in phases}
    seen: set[int] = set()
    for number, phase in enumerate(phases):
        if phase.stage in seen:
            back = Action(ActionKind.H2D, phase.stage, wire="gradients")
            before.setdefault(phases[number - 1].last, []).append(back)
        seen.add(phase.stage)
        place = phase.last
        if phase is final[phase.stage]:
            place = max(place, reduced_at.get(phase.stage, place))
        leave = Action(ActionKind.D2H, phase.stage, wire="gradients")
        behind.setdefault(place, []).append(leave)


def _merged(
    program: Sequence[Action],
    before: dict[int, list[Action]],
    behind: dict[int, list[Action]],
) -> tuple[Action, ...]:
    merged: list[Action] = []
    for index, action in enumerate(program):
        merged += before.get(index, ())
        merged.append(action)
        merged += behind.get(index, ())
    return tuple(merged)
