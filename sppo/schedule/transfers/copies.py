"""Placement of the copies of saved tensors to the next tier and back in a program.

The activation policy decides which units are offloaded, and how many bytes (costs.offload_bytes);
this module places their D2H and H2D in the programs. A D2H comes directly after its F. An H2D comes
before the backward that precedes its own, and may start when the compute before that is done,
because only then is the memory for it free.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from sppo.schedule.encoding import D2H, H2D, B, EncodedProgram, F, W
from sppo.schedule.schedule import Schedule


def place_copies(schedule: Schedule, *, offloaded: npt.NDArray[np.bool_]) -> Schedule:
    """Return `schedule` with a D2H and an H2D for every offloaded unit.

    Args:
        schedule: A training schedule without copies.
        offloaded: Whether a unit leaves the device, [num_stages, num_units].
    """
    if not offloaded.any():
        return schedule
    leaves = offloaded.ravel()
    encoded = tuple(_with_copies(program, leaves=leaves) for program in schedule.encoded)
    return replace(schedule, encoded=encoded)


def _with_copies(program: EncodedProgram, *, leaves: npt.NDArray[np.bool_]) -> EncodedProgram:
    """Return a rank's program with a D2H after each offloaded F, and an H2D ahead of its B."""
    forwards, backwards = (np.flatnonzero(program.codes == code) for code in (F, B))
    forward_at = np.zeros(leaves.size, dtype=np.intp)
    forward_at[program.slots[forwards]] = forwards
    computes = np.flatnonzero(np.isin(program.codes, (F, B, W)))
    # No backward precedes the first one; its copy starts at the compute before it.
    places = np.concatenate([computes[np.searchsorted(computes, backwards[:1]) - 1], backwards])
    ahead = np.maximum(places[:-1], forward_at[program.slots[backwards]] + 1)
    out, back = leaves[program.slots[forwards]], leaves[program.slots[backwards]]
    return program.insert(
        (forwards[out] + 1, program.take(forwards[out]).changed(D2H)),
        (ahead[back], program.take(backwards[back]).changed(H2D)),
    )
