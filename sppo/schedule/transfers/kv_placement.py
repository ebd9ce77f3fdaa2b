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

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Literal

import numpy as np

from sppo.schedule.actions import Action, ActionKind
from sppo.schedule.encoding import D2H, D2H_KV, H2D_KV, KV, B, EncodedProgram, F
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


def place_kv(
    schedule: Schedule, *, offloaded: Collection[int] = (), recomputed: Collection[int] = ()
) -> Schedule:
    """Return `schedule` with the copies and the recomputation of K and V.

    Args:
        schedule: A training schedule, with the copies of saved tensors and without messages, in
            which the units of these stages are whole.
        offloaded: Stages whose K and V leave the device.
        recomputed: Stages that drop K and V and recompute them.
    """
    if not offloaded and not recomputed:
        return schedule
    moves: dict[int, KVPlacement] = dict.fromkeys(offloaded, "offloaded")
    moves |= dict.fromkeys(recomputed, "recomputed")
    encoded = (_placed(program, schedule, moves=moves) for program in schedule.encoded)
    return replace(schedule, encoded=tuple(encoded))


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
    program: EncodedProgram, schedule: Schedule, *, moves: Mapping[int, KVPlacement]
) -> EncodedProgram:
    """Return the program of one rank with the copies and recomputations of K and V.

    Args:
        program: Program of the rank.
        schedule: Schedule of the program.
        moves: Placement of K and V on the stages that do not retain them.
    """
    codes, slots = program.codes, program.slots
    stages, units = np.divmod(slots, schedule.num_units)
    leaves = np.isin(stages, [stage for stage, kv in moves.items() if kv == "offloaded"])
    out = np.flatnonzero((codes == F) & leaves)
    # A copy of the unit's saved tensors comes first.
    follower = np.minimum(out + 1, codes.size - 1)
    out += 1 + ((codes[follower] == D2H) & (slots[follower] == slots[out]))
    inserted = [(out, EncodedProgram.of_whole_units(D2H_KV, slots[(codes == F) & leaves]))]
    sequences = np.searchsorted(schedule.unit_offsets, units, side="right") - 1
    backwards = np.flatnonzero(codes == B)
    forwards = np.flatnonzero((codes == F) & np.isin(stages, [*moves]))
    for stage, sequence in dict.fromkeys(zip(stages[forwards], sequences[forwards], strict=True)):
        own = forwards[(stages[forwards] == stage) & (sequences[forwards] == sequence)]
        is_own = (stages[backwards] == stage) & (sequences[backwards] == sequence)
        first = backwards[is_own][:1] if is_own.any() else np.zeros(1, dtype=np.intp)
        if moves[int(stage)] == "recomputed":
            inserted.append((first.repeat(own.size), program.take(own).changed(KV)))
            continue
        between = backwards[(backwards > own[-1]) & (backwards < first)]
        chosen = between[-own.size :] if between.size else first
        at = chosen[np.arange(own.size) * chosen.size // own.size]
        inserted.append((at, program.take(own).changed(H2D_KV)))
    return program.insert(*inserted)
