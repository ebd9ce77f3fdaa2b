"""Lower bound of the time of a pipeline, computed quickly before the pipeline is planned."""

from __future__ import annotations

import numpy as np

from sppo.cost.candidate import Candidate
from sppo.cost.stage_cost import stage_seconds
from sppo.schedule.orders.names import DEFERRING_WEIGHTS


def least_pipeline_s(candidate: Candidate) -> float:
    """Return a lower bound of the seconds of a step over all levels, without the update.

    A rank runs all its units, with everything retained. Before that, the first unit passes the
    ranks before it; afterwards, the backward of the last unit passes the same ranks.

    Args:
        candidate: Candidate with packed sequences.
    """
    units, ranks = stage_seconds(candidate).units, candidate.pipeline_parallel_degree
    of_stages = (units.forward + units.backward + units.weight).sum(axis=1)
    busy = of_stages.reshape(-1, ranks).sum(axis=0)
    filling = units.forward[:ranks, 0]
    last = candidate.distinct_sequences[-1].start
    draining = (units.backward + units.weight)[:ranks, last]
    if candidate.schedule in DEFERRING_WEIGHTS:  # deferred weight gradients may overlap
        draining = np.zeros_like(draining)
    ends = filling + draining
    return float((busy + np.cumsum(ends) - ends).max())
