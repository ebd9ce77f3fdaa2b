"""Placement of K and V between a stage's forward and its backward.

All later subsequences of a sequence read K and V, so K and V of a stage are in use from its first
forward to its last one, and again from its first backward on, which reads all of them. In between
they need not be on the device:

* Copied. The D2H of a unit comes after its F and the copy of its saved tensors. The H2Ds are spread
  over the last backwards of the same rank before the stage's first backward, at most as many
  backwards as the sequence has units: each H2D precedes a backward and is done when that backward
  ends.
* Recomputed. The KVs of a sequence come directly before the stage's first backward of that
  sequence.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Literal

from sppo.quoting import quoted
from sppo.schedule.actions import Action, ActionKind
from sppo.schedule.schedule import Schedule

KVPlacement = Literal["retained", "offloaded", "recomputed"]
"""Placement of a stage's K and V between its forward and its backward of a sequence."""


@cache
def kv_of_turns(kv: KVPlacement, *, recomputed: int, turns: int) -> tuple[KVPlacement, ...]:
    """Return the K/V placement of each stage of a rank, in the order of their forwards.

    The backward of the last stage directly follows its forward, so the last stage retains K and V.

    Args:
        kv: Placement for the stages that do not recompute.
        recomputed: Number of stages that recompute instead, spread evenly over all but the last.
        turns: Number of stages of the rank.
    """
    others = turns - 1
    own: tuple[KVPlacement, ...] = tuple(
        kv if turn * recomputed // others == (turn + 1) * recomputed // others else "recomputed"
        for turn in range(others)
    )
    return (*own, "retained")


_StageSequence = tuple[int, int | None]
"""(stage, sequence)."""


def place_kv(
    schedule: Schedule, *, offloaded: Collection[int] = (), recomputed: Collection[int] = ()
) -> Schedule:
    """Return `schedule` with the copies and the recomputation of K and V.

    Args:
        schedule: A training schedule, with the copies of saved tensors and without messages.
        offloaded: Stages whose K and V leave the device.
        recomputed: Stages that drop K and V and recompute them.

    Raises:
        ValueError: A forward-only schedule, a schedule that cuts units of an offloaded or
            recomputed stage (MSP), or a stage that is both offloaded and recomputed.
    """
    if not offloaded and not recomputed:
        return schedule
    both = sorted({*offloaded} & {*recomputed})
    if both:
        raise ValueError(f"K and V of stages {both} are both copied and recomputed: choose one")
    if not schedule.is_training:
        raise ValueError(
            f"schedule {quoted(schedule.name)} has no backward: nothing reads K and V again, so "
            "they are neither copied nor recomputed; keep them"
        )
    stages = {*offloaded, *recomputed}
    for action in (a for program in schedule.programs for a in program):
        if action.num_shards > 1 and action.stage in stages:
            raise ValueError(
                f"{action} is a shard of a unit whose K and V would not stay: keep K and V where "
                "units are cut (multiplexed sequence partitioning)"
            )
    programs = tuple(
        _placed(program, offloaded={*offloaded}, recomputed={*recomputed})
        for program in schedule.programs
    )
    return replace(schedule, programs=programs)


def kv_placement(actions: Iterable[Action]) -> KVPlacement:
    """Return the placement of one stage's K and V in a program.

    Args:
        actions: Actions of the stage.
    """
    for action in actions:
        if action.wire == "kv":
            return "offloaded"
        if action.kind is ActionKind.KV:
            return "recomputed"
    return "retained"


def _placed(
    program: Sequence[Action], *, offloaded: Collection[int], recomputed: Collection[int]
) -> tuple[Action, ...]:
    before = _before_backwards(program, offloaded=offloaded, recomputed=recomputed)
    placed: list[Action] = []
    for index, action in enumerate(program):
        placed += before.get(index, ())
        placed.append(action)
        if action.stage not in offloaded or action.kind not in (ActionKind.F, ActionKind.D2H):
            continue
        follower = program[index + 1] if index + 1 < len(program) else None
        if follower != action._replace(kind=ActionKind.D2H):
            placed.append(action._replace(kind=ActionKind.D2H, wire="kv"))
    return tuple(placed)


def _before_backwards(
    program: Sequence[Action], *, offloaded: Collection[int], recomputed: Collection[int]
) -> dict[int, list[Action]]:
    """Return H2Ds of K and V, and KVs, by the position of the backward that they precede."""
    forwards: dict[_StageSequence, list[Action]] = {}
    first_backward: dict[_StageSequence, int] = {}
    last_forward: dict[_StageSequence, int] = {}
    backwards = []
    for index, action in enumerate(program):
        key = action.stage, action.sequence
        if action.kind is ActionKind.F:
            forwards.setdefault(key, []).append(action)
            last_forward[key] = index
        elif action.kind is ActionKind.B:
            backwards.append(index)
            first_backward.setdefault(key, index)
    found: dict[int, list[Action]] = {}
    for key, units in forwards.items():
        end = first_backward.get(key, 0)
        if key[0] in recomputed:
            found.setdefault(end, []).extend(a._replace(kind=ActionKind.KV) for a in units)
        elif key[0] in offloaded:
            begin = bisect_right(backwards, last_forward[key])
            possible = backwards[begin : bisect_left(backwards, end)]
            chosen = possible[-len(units) :] or [end]
            for number, action in enumerate(units):
                place = chosen[number * len(chosen) // len(units)]
                back = action._replace(kind=ActionKind.H2D, wire="kv")
                found.setdefault(place, []).append(back)
    return found
