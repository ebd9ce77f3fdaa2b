"""Placing the copies of K and V that leave the device between a stage's forward and its backward.

All later subsequences of a sequence read K and V, so those of a stage are in use from its first
forward to its last one, and again from its first backward on, which reads all of them. In between
they may leave. The D2H of a unit stands behind its F and the copy of its saved tensors. The H2Ds
are spread over the backwards of the same rank that run before the stage's first one, as many of
them as the sequence has units: each stands in front of a backward and is done when that ends.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from sppo.quoting import quoted
from sppo.schedule.actions import Action, ActionKind, Schedule


def place_kv_copies(schedule: Schedule, *, stages: Collection[int]) -> Schedule:
    """`schedule` with a D2H and an H2D of K and V for every unit of some stages.

    Args:
        schedule: A training schedule, with the copies of saved tensors and without messages.
        stages: Whose K and V leave the device.

    Raises:
        ValueError: a forward-only schedule, or one that cuts units of such a stage (MSP).
    """
    if not stages:
        return schedule
    if not schedule.is_training:
        raise ValueError(
            f"schedule {quoted(schedule.name)} has no backward: K and V need not come back, so "
            "they cannot be offloaded; keep them"
        )
    programs = tuple(_with_copies(program, stages=stages) for program in schedule.programs)
    return replace(schedule, programs=programs)


def _with_copies(program: Sequence[Action], *, stages: Collection[int]) -> tuple[Action, ...]:
    before = _returns(program, stages=stages)
    placed: list[Action] = []
    for index, action in enumerate(program):
        placed += before.get(index, ())
        placed.append(action)
        if action.stage not in stages or action.kind not in (ActionKind.F, ActionKind.D2H):
            continue
        if action.num_shards > 1:
            raise ValueError(
                f"{action} is a shard of a unit whose K and V would leave the device: keep K and V "
                "where units are cut (multiplexed sequence partitioning)"
            )
        follower = program[index + 1] if index + 1 < len(program) else None
        if follower != replace(action, kind=ActionKind.D2H):
            placed.append(replace(action, kind=ActionKind.D2H, wire="kv"))
    return tuple(placed)


def _returns(program: Sequence[Action], *, stages: Collection[int]) -> dict[int, list[Action]]:
    """H2Ds of K and V by the position of the backward in front of which they stand."""
    units: dict[tuple[int, int | None], list[Action]] = {}
    first_backward: dict[tuple[int, int | None], int] = {}
    last_forward: dict[tuple[int, int | None], int] = {}
    backwards = []
    for index, action in enumerate(program):
        key = action.stage, action.sequence
        if action.kind is ActionKind.F and action.stage in stages:
            units.setdefault(key, []).append(action)
            last_forward[key] = index
        elif action.kind is ActionKind.B:
            backwards.append(index)
            first_backward.setdefault(key, index)
    found: dict[int, list[Action]] = {}
    for key, forwards in units.items():
        end = first_backward[key]
        possible = [index for index in backwards if last_forward[key] < index < end]
        chosen = possible[-len(forwards) :] or [end]
        for number, action in enumerate(forwards):
            place = chosen[number * len(chosen) // len(forwards)]
            back = replace(action, kind=ActionKind.H2D, wire="kv")
            found.setdefault(place, []).append(back)
    return found
