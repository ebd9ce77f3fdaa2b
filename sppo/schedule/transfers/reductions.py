"""Placement of the reductions of gradients between the compute actions of a program."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sppo.schedule.encoding import REDUCE, B, EncodedProgram, W


def with_reductions(
    program: EncodedProgram, *, stages: Sequence[int], num_units: int
) -> EncodedProgram:
    """Return the compute of one rank with a REDUCE for each stage in `stages`.

    The REDUCE of a stage follows the last B or W of the stage. The REDUCE of the stage that ends
    last is at the end of the program, after shards of other ranks' stages: the rank waits there
    for all reductions in flight.
    """
    backwards = np.flatnonzero((program.codes == B) | (program.codes == W))
    stage_of = program.slots[backwards] // num_units
    ends = {
        stage: int(own[-1]) + 1 for stage in stages if (own := backwards[stage_of == stage]).size
    }
    if not ends:
        return program
    ends[max(ends, key=ends.__getitem__)] = program.codes.size
    reductions = EncodedProgram.of_whole_units(REDUCE, list(ends))
    return program.insert((list(ends.values()), reductions))
