"""Prices of a candidate's step: cost tables, closed form, and lower bounds of its seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sppo.activations.placement import ActivationPlacement
from sppo.cost.candidate import Candidate
from sppo.cost.stage_cost import (
    StageSeconds,
    message_bytes,
    message_seconds,
    pipeline_links,
    stage_costs,
)
from sppo.cost.step_bound import StepTables, least_compute_s, least_copies_s, step_tables
from sppo.cost.step_time import StepTime, step_times
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

    @cached_property
    def least_s(self) -> float:
        """Lower bound of the simulated step time, unless units are cut over ranks (MSP)."""
        work = step_tables(self.candidate, self.costs)
        return max(least_compute_s(work), least_copies_s(work, self.costs))

    @property
    def is_exact(self) -> bool:
        """True if the simulated step time equals the closed form.

        It does not if units are cut (MSP), weight gradients are deferred, stages of a rank
        interleave, sequences overlap, or activations, K and V, weights or gradients are copied.
        """
        candidate, costs = self.candidate, self.costs
        one_order = candidate.schedule == LOOPED or (
            candidate.virtual_stages == 1
            and candidate.schedule not in (*DEFERRING_WEIGHTS, "sppo_msp")
        )
        one_at_a_time = candidate.schedule == LOOPED or 1 in (
            candidate.sequences,
            candidate.pipeline_parallel_degree,
        )
        copies = costs.copies_stages or bool(costs.offload_bytes.any())
        return one_order and one_at_a_time and not copies


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


def least_seconds(candidate: Candidate, *, seconds: StageSeconds) -> float:
    """Return a lower bound of the step time of a candidate over all activation policies.

    Args:
        candidate: Candidate to bound.
        seconds: Seconds of the candidate's units, with everything retained.
    """
    units, carried_s = seconds.units, message_seconds(candidate)
    tables = StepTables(
        schedule=candidate.schedule,
        num_ranks=candidate.pipeline_parallel_degree,
        num_sequences=candidate.sequences,
        forward_s=units.forward + carried_s,
        backward_s=units.backward + carried_s,
        weight_s=units.weight,
        kv_recompute_s=np.zeros_like(units.weight),
        message_bytes=message_bytes(candidate),
        links=pipeline_links(candidate),
        reduce_s=seconds.reduce_s + seconds.update_s,
    )
    return least_compute_s(tables)
