"""Lower bound of the time of a pipeline, quick to tell before one is planned."""

from __future__ import annotations

import numpy as np

from sppo.cost.candidate import Candidate
from sppo.cost.stage_cost import stage_seconds
from sppo.schedule.generators import DEFERRING_WEIGHTS


def least_pipeline_s(candidate: Candidate) -> float:
    """Return the seconds that no levels of a candidate go below, without the update.

    A rank is busy with all units, everything retained; before it begins, the first one passes the
    ranks in front of it, and so does the last one when it has ended.

    Args:
        candidate: with packed sequences.
    """
    units, ranks = stage_seconds(candidate).units, candidate.pipeline_parallel_degree
    of_stages = (units.forward + units.backward + units.weight).sum(axis=1)
    busy = of_stages.reshape(-1, ranks).sum(axis=0)
    filling = units.forward[:ranks, 0]
    last = candidate.distinct_sequences[-1].start
    draining = (units.backward + units.weight)[:ranks, last]
    if candidate.schedule in DEFERRING_WEIGHTS:  # its weight half may run beside other ranks
        draining = np.zeros_like(draining)
    ends = filling + draining
    return float((busy + np.cumsum(ends) - ends).max())
