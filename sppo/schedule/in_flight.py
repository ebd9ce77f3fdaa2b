"""Number of units that a rank holds between their forward and the end of their backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from sppo.schedule.actions import Action, ActionKind
from sppo.schedule.encoding import B, EncodedProgram, F, W
from sppo.schedule.msp_groups import MspGroup, shard_shares


def peak_in_flight(program: EncodedProgram, *, groups: Mapping[int, MspGroup]) -> float:
    """Return the largest number of units that a rank holds between their F and their last B or W.

    A shard counts as its share of the unit. In evaluation, which keeps nothing, a unit is in
    flight only while it runs.
    """
    shares = shard_shares(program, groups=groups)
    forward = np.where(program.codes == F, shares, 0.0)
    done = np.flatnonzero((program.codes == B) | (program.codes == W))
    if done.size:
        # The last of B and W of a slot releases it: the first one of the reversed order.
        _, last = np.unique(program.slots[done][::-1], return_index=True)
        release = done[::-1][last]
        forward[release] -= shares[release]
        forward = np.cumsum(forward)
    # Shares of a unit add up to 1 only up to rounding.
    return round(float(forward.max(initial=0.0)), 9)


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
