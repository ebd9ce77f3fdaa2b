"""Placement of the copies of saved tensors to the next tier and back in a program.

The activation policy decides which units are offloaded, and how many bytes (costs.offload_bytes);
this module places their D2H and H2D in the programs. A D2H comes directly after its F. An H2D comes
some backwards before its own backward, and may start when the preceding compute is done, because
only then is the memory for it free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from sppo.quoting import quoted
from sppo.schedule.actions import Action, ActionKind
from sppo.schedule.schedule import Schedule


def place_copies(
    schedule: Schedule, *, offloaded: npt.NDArray[np.bool_], prefetch: int = 1
) -> Schedule:
    """Return `schedule` with a D2H and an H2D for every offloaded unit.

    Args:
        schedule: A training schedule without copies.
        offloaded: Whether a unit leaves the device, [num_stages, num_units].
        prefetch: How many backwards before its own a unit starts to come back: a larger number
            hides longer copies and keeps more units on the device.

    Raises:
        ValueError: A forward-only schedule, a schedule that has copies, or a table of another
            shape.
    """
    if offloaded.shape != (schedule.num_stages, schedule.num_units):
        raise ValueError(
            f"offloaded has shape {offloaded.shape}: must be one flag per stage and unit, "
            f"({schedule.num_stages}, {schedule.num_units})"
        )
    if prefetch < 1:
        raise ValueError(f"prefetch is {prefetch}: must be at least 1 backward ahead")
    if not offloaded.any():
        return schedule
    if not schedule.is_training:
        raise ValueError(
            f"schedule {quoted(schedule.name)} has no backward: nothing is kept, so nothing can be "
            "offloaded; set every offload ratio to 0"
        )
    offsets, leaves = schedule.unit_offsets, offloaded.tolist()
    programs = tuple(
        _with_copies(program, offloaded=leaves, offsets=offsets, prefetch=prefetch)
        for program in schedule.programs
    )
    return replace(schedule, programs=programs)


def _with_copies(
    program: Sequence[Action],
    *,
    offloaded: Sequence[Sequence[bool]],
    offsets: Sequence[int],
    prefetch: int,
) -> tuple[Action, ...]:
    """Return a rank's program with a D2H after each offloaded F, and an H2D ahead of its B."""
    forward_at: dict[tuple[int, int | None, int | None], int] = {}
    backwards: list[int] = []
    last_compute = 0
    before: dict[int, list[Action]] = {}
    for index, action in enumerate(program):
        kind, stage, sequence, subsequence, *_ = action
        if kind is ActionKind.F:
            forward_at[stage, sequence, subsequence] = index
        elif kind is ActionKind.B:
            if _leaves(action, offloaded, offsets):
                own = forward_at[stage, sequence, subsequence]
                # No backward precedes the first one; its copy starts at the compute before it.
                place = backwards[-prefetch:][0] if backwards else last_compute
                back = Action(ActionKind.H2D, *action[1:])
                before.setdefault(max(place, own + 1), []).append(back)
            backwards.append(index)
        elif kind in (ActionKind.D2H, ActionKind.H2D):
            raise ValueError(f"{action} is there already: place copies only once")
        if kind in (ActionKind.F, ActionKind.B, ActionKind.W):
            last_compute = index
    placed: list[Action] = []
    for index, action in enumerate(program):
        placed.extend(before.get(index, ()))
        placed.append(action)
        if action.kind is ActionKind.F and _leaves(action, offloaded, offsets):
            placed.append(Action(ActionKind.D2H, *action[1:]))
    return tuple(placed)


def _leaves(action: Action, offloaded: Sequence[Sequence[bool]], offsets: Sequence[int]) -> bool:
    sequence, subsequence = action.unit
    return offloaded[action.stage][offsets[sequence] + subsequence]
