"""Number of units that a rank holds between their forward and the end of their backward."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sppo.schedule.actions import Action, ActionKind
from sppo.schedule.encoding import B, F, W
from sppo.schedule.schedule import Schedule


def peak_in_flight(schedule: Schedule) -> list[float]:
    """Return the largest number of units that each rank holds between their F and last B or W.

    A shard counts as its share of the unit. In evaluation, which keeps nothing, a unit is in
    flight only while it runs.
    """
    actions, shares = schedule.actions, schedule.shares
    changes = np.where(actions.codes == F, shares, 0.0)
    done = actions.of(B, W)
    # The last of B and W of a slot on a rank releases it: the first one of the reversed order.
    slots = actions.ranks * actions.size + actions.slots
    _, last = np.unique(slots[done][::-1], return_index=True)
    release = done[::-1][last]
    changes[release] -= shares[release]
    ends = np.searchsorted(actions.ranks[:-1], np.arange(schedule.num_ranks), side="right")
    held = [
        np.cumsum(own) if schedule.is_training else own for own in np.split(changes[:-1], ends)[:-1]
    ]
    # Shares of a unit add up to 1 only up to rounding.
    return [round(float(own.max(initial=0.0)), 9) for own in held]


def sequences_in_flight(actions: Iterable[Action]) -> int:
    """Return the largest number of consecutive sequences that a stage, or a rank, holds at once.

    A sequence is held from its first F to its last B or W; sequences begin in order.

    Args:
        actions: Actions of one stage, or of all stages of a rank, in program order.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, action in enumerate(actions):
        if action.sequence is None:
            continue
        if action.kind is ActionKind.F:
            first.setdefault(action.sequence, position)
        elif action.kind in (ActionKind.B, ActionKind.W):
            last[action.sequence] = position
    most = 1
    for sequence, begin in first.items():
        held = [other for other in range(sequence) if last.get(other, -1) > begin]
        most = max(most, sequence - min(held) + 1 if held else 1)
    return most
