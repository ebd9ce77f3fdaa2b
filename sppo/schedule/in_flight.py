"""How many units a rank holds between their forward and the end of their backward."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sppo.schedule.encoding import B, EncodedProgram, F, W


def units_in_flight(program: EncodedProgram) -> npt.NDArray[np.float64]:
    """Units between their F and their last B or W after each action; a piece of g counts 1/g.

    In evaluation nothing is kept: a unit is in flight while it runs.
    """
    forward = np.where(program.codes == F, 1.0 / program.num_pieces, 0.0)
    done = np.flatnonzero((program.codes == B) | (program.codes == W))
    if not done.size:
        return forward
    # The last of B and W of a slot releases it: the first one of the reversed order.
    _, last = np.unique(program.slots[done][::-1], return_index=True)
    release = done[::-1][last]
    forward[release] -= 1.0 / program.num_pieces[release]
    return np.cumsum(forward)


def peak_in_flight(program: EncodedProgram) -> float:
    """The most units a rank holds at once."""
    # Thirds and sevenths of units add up to whole ones only nearly.
    return round(float(units_in_flight(program).max(initial=0.0)), 9)
