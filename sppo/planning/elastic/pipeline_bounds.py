"""Lower bounds of the time of pipelines of some sequences, quick to tell before one is planned."""

from __future__ import annotations

import numpy as np

from sppo.cost.candidate import Candidate
from sppo.cost.stage_cost import stage_seconds
from sppo.schedule.costs import Table
from sppo.schedule.generators import DEFERRING_WEIGHTS


class PipelineBounds:
    """Seconds that no pipeline of a candidate's sequences goes below, whatever its levels.

    A rank is busy with all units, everything retained; before it begins, the first one passes the
    ranks in front of it, and so does the last one when it has ended.

    Args:
        candidate: with packed sequences.
    """

    def __init__(self, candidate: Candidate) -> None:
        units, ranks = stage_seconds(candidate).units, candidate.pipeline_parallel_degree
        self._ends = [0, *(own.stop for own in candidate.distinct_sequences)]
        of_stages = units.forward + units.backward + units.weight
        of_ranks = of_stages.reshape(-1, ranks, of_stages.shape[1]).sum(axis=0)
        self._up_to: Table = np.pad(np.cumsum(of_ranks, axis=1), ((0, 0), (1, 0)))
        backward = units.backward[:ranks] + units.weight[:ranks]
        if candidate.schedule in DEFERRING_WEIGHTS:  # its weight half may run beside other ranks
            backward = np.zeros_like(backward)
        self._filling, self._draining = (
            np.pad(np.cumsum(table, axis=0)[:-1], ((1, 0), (0, 0)))
            for table in (units.forward[:ranks], backward)
        )

    def least_s(self, own: range) -> float:
        """Return the seconds that a pipeline takes at least, without the update.

        Args:
            own: places of its sequences among those of the candidate.
        """
        begin, end = self._ends[own.start], self._ends[own.stop]
        busy = self._up_to[:, end] - self._up_to[:, begin]
        last = self._ends[own.stop - 1]
        return float((busy + self._filling[:, begin] + self._draining[:, last]).max())
