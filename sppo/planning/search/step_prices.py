"""Prices of a candidate's step: cost tables, closed form, and a lower bound of its seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sppo.activations.placement import ActivationPlacement
from sppo.cost.candidate import Candidate
from sppo.cost.stage_cost import (
    StageSeconds,
    stage_costs,
    stage_seconds,
)
from sppo.cost.step_time import StepTime, step_times
from sppo.cost.values_of_ranks import of_ranks
from sppo.schedule.costs import Costs
from sppo.schedule.orders.names import DEFERRING_WEIGHTS, LOOPED


@dataclass(frozen=True, eq=False)
class StepPrices:
    """Costs of a candidate's step under a placement, computed on first use.

    Attributes:
        candidate: Candidate to price.
        seconds: Seconds of the candidate's units, with everything retained.
        placement: Placement of the candidate's activations.
    """

    candidate: Candidate
    seconds: StageSeconds
    placement: ActivationPlacement

    @cached_property
    def costs(self) -> Costs:
        """Cost tables of the step, for the simulator."""
        return stage_costs(self.candidate, seconds=self.seconds, placement=self.placement)

    @cached_property
    def time(self) -> StepTime:
        """Time of the step, in closed form."""
        return times_of_placements([self])[0]


def times_of_placements(prices: Sequence[StepPrices]) -> list[StepTime]:
    """Return the times of one candidate's step under several placements, in closed form."""
    candidate = prices[0].candidate
    return step_times(
        [one.costs for one in prices],
        num_sequences=candidate.sequences,
        looped_ranks=looped_ranks(candidate),
    )


def looped_ranks(candidate: Candidate) -> int | None:
    """Return the number of pipeline ranks if a candidate runs in the looped order; None otherwise.

    An interleaved schedule with several stages on a rank counts as looped: it takes as long for one
    group of sequences, and overlaps several groups.
    """
    looped = candidate.schedule == LOOPED or candidate.virtual_stages > 1
    return candidate.pipeline_parallel_degree if looped else None


def least_seconds(candidate: Candidate) -> float:
    """Return a lower bound of the step time of a candidate over all activation policies.

    The *way* through a rank is such a bound: the first unit travels down to the rank, the rank runs
    all its work, and the backward of that unit, its last action unless weight halves are put off,
    travels up to the first rank. Units that are cut over ranks (MSP) travel faster: then it is the
    work of a mean rank.
    """
    seconds, ranks = stage_seconds(candidate), candidate.pipeline_parallel_degree
    units, updated_s = seconds.units, seconds.reduce_s + seconds.update_s
    passes = units.forward + units.backward + units.weight
    work_s = of_ranks(candidate, passes.sum(axis=1) + updated_s)
    work_s = work_s - updated_s[:ranks] + updated_s[:ranks].min()
    if candidate.schedule == "sppo_msp":
        return float(work_s.mean())
    defers = candidate.schedule in DEFERRING_WEIGHTS
    way_s = units.forward[: ranks - 1, 0] if defers else passes[: ranks - 1, 0]
    return float((work_s + np.concatenate([[0.0], np.cumsum(way_s)])).max())
