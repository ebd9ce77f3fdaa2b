"""Placement of copies to the next tier and back, and of the recomputation of K and V.

* Saved tensors. The activation policy decides which units are offloaded, and how many bytes. A D2H
  comes directly after its F. An H2D comes before the backward that precedes its own, and may start
  when the compute before that is done, because only then is the memory for it free.
* K and V. All later subsequences of a sequence read them, so K and V of a stage are in use from its
  first forward to its last one, and again from its first backward on, which reads all of them. In
  between they need not be on the device:

  * Copied. The D2H of a unit comes after its F and the copy of its saved tensors. The H2Ds are
    spread over the last backwards of the same rank before the stage's first backward, at most as
    many backwards as the sequence has units: each H2D precedes a backward and is done when that
    backward ends.
  * Recomputed. The KVs of a sequence come directly before the stage's first backward of that
    sequence.
* Weights and gradients of a rank with several stages, which computes with one stage for a while,
  then with the next. A *phase* is such a period: consecutive actions of a rank that read the
  weights of one stage, or add to its gradients.

  * `H2D_WEIGHTS` names a stage whose weights are copied to the device, unless they are there
    already; they stay until two other stages have been named. Each phase is preceded by the
    `H2D_WEIGHTS` of the next phase, so weights are copied one phase ahead, into the memory of the
    phase before.
  * `D2H_GRADIENTS` of a stage comes after each of its phases; the last one comes after its REDUCE,
    too. If a stage has several phases, `H2D_GRADIENTS` brings the accumulated gradients back before
    the last action of the preceding phase, when the latest D2H has freed memory for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache
from typing import Literal

import numpy as np

from sppo.schedule.actions import Action, ActionKind, Op
from sppo.schedule.graph import Flags, Ints
from sppo.schedule.schedule import Schedule, columns_of

KVPlacement = Literal["retained", "offloaded", "recomputed"]
"""Placement of a stage's K and V between its forward and its backward of a sequence."""

WindowedKV = Literal["retained", "recomputed"]
"""Treatment of K and V of layers with a sliding window on stages that retain K and V."""


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


def place_copies(
    schedule: Schedule,
    *,
    offloaded: Flags | None = None,
    kv_offloaded: Collection[int] = (),
    kv_recomputed: Collection[int] = (),
) -> Schedule:
    """Return `schedule` with the copies of saved tensors, and the copies or recomputation of K/V.

    Stages without a backward save nothing, so nothing of them is copied or recomputed.

    Args:
        schedule: A schedule without copies.
        offloaded: Whether a unit leaves the device, [num_stages, num_units]; no unit if not given.
        kv_offloaded: Stages whose K and V leave the device; their units are whole.
        kv_recomputed: Stages that drop K and V and recompute them; their units are whole.
    """
    forward, backward = schedule.of(Op.F), schedule.of(Op.B)
    slots, stages = schedule.slots, schedule.stages
    forward = forward[stages[forward] >= schedule.forward_only_stages]
    leaves = np.zeros(schedule.size, dtype=bool) if offloaded is None else offloaded.ravel()
    out, kv_out = (
        forward[leaves[slots[forward]]],
        forward[np.isin(stages[forward], [*kv_offloaded])],
    )
    back = backward[leaves[slots[backward]]]
    kv_back = forward[np.isin(stages[forward], [*kv_offloaded, *kv_recomputed])]
    is_recomputed = np.isin(stages[kv_back], [*kv_recomputed])
    before_first, at = _kv_places(schedule, kv_back)
    return schedule.insert(
        (out + 1, schedule.alike(out, Op.D2H)),
        (kv_out + 1, schedule.alike(kv_out, Op.D2H_KV)),
        (_h2d_places(schedule, back), schedule.alike(back, Op.H2D)),
        (
            np.where(is_recomputed, before_first, at),
            schedule.alike(kv_back, np.where(is_recomputed, Op.KV, Op.H2D_KV)),
        ),
    )


def _h2d_places(schedule: Schedule, back: Ints) -> Ints:
    """Return the place of the H2D of each backward `back`."""
    ranks, forward = schedule.ranks, schedule.at(Op.F, schedule.slots[back], schedule.shards[back])
    before, is_before = schedule.nearest(back, schedule.of(Op.B), of=ranks)
    # No backward precedes the first one; its copy starts at the compute before it.
    compute, _ = schedule.nearest(back, schedule.compute, of=ranks)
    return np.maximum(np.where(is_before, before, compute), forward + 1)


def _kv_places(schedule: Schedule, forward: Ints) -> tuple[Ints, Ints]:
    """Return the places of the recomputations, and of the H2Ds, of the K and V of `forward`."""
    last_slots = schedule.slots[forward] + schedule.behind[forward]
    last, first = schedule.at(Op.F, last_slots), schedule.at(Op.B, last_slots)
    backward, index = schedule.of(Op.B), schedule.before[forward]
    count = index + schedule.behind[forward] + 1
    end = np.searchsorted(backward, first)
    begin = np.maximum(np.searchsorted(backward, last), end - count)
    # Without a backward between, the copies come before the first backward itself.
    return first, backward[begin + index * np.maximum(1, end - begin) // count]


def place_state(schedule: Schedule, *, weights: bool, gradients: bool) -> Schedule:
    """Return `schedule` with the copies of weights and gradients that live in another tier.

    Args:
        schedule: Schedule with all actions except messages, of whole units.
        weights: Whether weights live in another tier.
        gradients: Whether gradients live in another tier; an evaluation has none.
    """
    gradients = gradients and schedule.is_training
    adds = np.isin(schedule.codes, (Op.B, Op.W))
    # Forwards of the last stage form the gradients of the head.
    adds |= (schedule.codes == Op.F) & (schedule.stages == schedule.num_stages - 1)
    reads = np.isin(schedule.codes, (Op.F, Op.KV, Op.B))
    inserted = [
        *([_leaving(schedule, adds)] if gradients else []),
        *([_fetched(schedule, reads)] if weights else []),
        *([_returning(schedule, adds)] if gradients else []),
    ]
    return schedule.insert(*inserted) if inserted else schedule


def _phases(schedule: Schedule, uses: Flags) -> tuple[Ints, Ints, Ints]:
    """Return the stage, the first and the last action of each phase, of all ranks in turn."""
    actions = np.flatnonzero(uses)
    changes = np.flatnonzero(np.diff(schedule.stages[actions], prepend=-1, append=-1))
    first, last = actions[changes[:-1]], actions[changes[1:] - 1]
    return schedule.stages[first], first, last


def _of_stages(schedule: Schedule, code: int, stages: Ints) -> Ints:
    """Return actions of whole stages as columns."""
    return columns_of(stages % schedule.num_ranks, code, stages)


def _fetched(schedule: Schedule, reads: Flags) -> tuple[Ints, Ints]:
    """Return the H2Ds of weights: that of the first phase, and in each phase that of the next."""
    stages, first, _ = _phases(schedule, reads)
    is_first = np.diff(schedule.ranks[first], prepend=-1) != 0
    at = np.where(is_first, first, np.roll(first, 1))
    return at, _of_stages(schedule, Op.H2D_WEIGHTS, stages)


def _leaving(schedule: Schedule, adds: Flags) -> tuple[Ints, Ints]:
    """Return the D2Hs of gradients, one after each phase."""
    stages, _, at = _phases(schedule, adds)
    reductions = np.zeros(schedule.num_stages, dtype=np.int64)
    reduced = schedule.of(Op.REDUCE)
    reductions[schedule.stages[reduced]] = reduced
    _, from_the_end = np.unique(stages[::-1], return_index=True)
    final = stages.size - 1 - from_the_end
    at[final] = np.maximum(at[final], reductions[stages[final]])
    return at + 1, _of_stages(schedule, Op.D2H_GRADIENTS, stages)


def _returning(schedule: Schedule, adds: Flags) -> tuple[Ints, Ints]:
    """Return the H2Ds of gradients, one in the phase before each further phase of a stage."""
    stages, _, last = _phases(schedule, adds)
    _, firsts = np.unique(stages, return_index=True)
    again = np.delete(np.arange(stages.size), firsts)
    return last[again - 1], _of_stages(schedule, Op.H2D_GRADIENTS, stages[again])
