"""Lower bounds of the seconds of a step: no simulation of the step is faster.

The *way* through a rank has three parts: the first unit travels down to the rank, the rank runs all
its work, and its last action, the backward of the last unit, travels up to the first rank. If units
have the same order on all ranks, the flow shops of :mod:`sppo.cost.step_time` are a lower bound,
too. Copies in one direction run one after another: D2H copies begin after the first forward, H2D
copies after the forwards of the first sequence, and the last backward ends after all H2D copies.
The bounds do not hold with MSP, whose ranks run units of each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sppo.cost.candidate import Candidate
from sppo.cost.step_time import parts_of_step, stage_wires
from sppo.hardware.rates import Floats
from sppo.schedule.costs import Costs, Links, Table
from sppo.schedule.orders.names import DEFERRING_WEIGHTS, LOOPED


@dataclass(frozen=True, slots=True, eq=False)
class StepTables:
    """Seconds and bytes that the ranks of a step compute, send and reduce; tables [stages, units].

    Attributes:
        schedule: Name of the schedule.
        num_ranks: Pipeline ranks; stage s is on rank s mod `num_ranks`.
        num_sequences: Sequences of the step, all cut alike.
        forward_s: Seconds of each forward.
        backward_s: Seconds of each backward without its weight half.
        weight_s: Seconds of each weight half.
        kv_recompute_s: Seconds of recomputing K and V before a backward.
        message_bytes: Bytes of a message between stages, [units].
        links: Links between ranks.
        reduce_s: Seconds of reducing gradients; in the entry of the first stage of each rank also
            of the update, [stages].
    """

    schedule: str
    num_ranks: int
    num_sequences: int
    forward_s: Table
    backward_s: Table
    weight_s: Table
    kv_recompute_s: Table
    message_bytes: Floats
    links: Links
    reduce_s: Floats

    @property
    def defers_weights(self) -> bool:
        """True if weight halves run as separate actions (W)."""
        return self.schedule in DEFERRING_WEIGHTS

    @property
    def backward_critical_s(self) -> Table:
        """Seconds of a backward that the previous stage waits for, [stages, units]."""
        return self.backward_s if self.defers_weights else self.backward_s + self.weight_s

    def of_ranks(self, of_stages: Table) -> Table:
        """Return the sum of values [stages] over the stages of each rank, [ranks]."""
        sums: Table = of_stages.reshape(-1, self.num_ranks).sum(axis=0)
        return sums

    @property
    def reduced_between_s(self) -> Table:
        """Seconds of reductions between the stages of a rank: of all but its first, [ranks]."""
        return self.of_ranks(self.reduce_s) - self.reduce_s[: self.num_ranks]

    def ramp_seconds(self) -> tuple[Table, Table]:
        """Return the seconds before each rank begins, and after its last backward, [ranks] each."""
        ranks = self.num_ranks
        down, up = stage_wires(self.links, message_bytes=self.message_bytes, num_stages=ranks)
        to_rank, from_rank = (
            np.concatenate([[0.0], np.cumsum(seconds[: ranks - 1, 0] + wires.hops_s(0))])
            for seconds, wires in ((self.forward_s, down), (self.backward_critical_s, up))
        )
        follows: Table = from_rank + np.maximum.accumulate(self.reduce_s[:ranks] - from_rank)
        return to_rank, follows


def step_tables(candidate: Candidate, costs: Costs) -> StepTables:
    """Return the tables of a step of `candidate`, whose costs are `costs`."""
    return StepTables(
        schedule=candidate.schedule,
        num_ranks=candidate.pipeline_parallel_degree,
        num_sequences=candidate.sequences,
        forward_s=costs.forward_s,
        backward_s=costs.backward_s,
        weight_s=costs.weight_s,
        kv_recompute_s=costs.kv_recompute_s,
        message_bytes=costs.message_bytes,
        links=costs.links,
        reduce_s=costs.reduce_s,
    )


def least_compute_s(tables: StepTables) -> float:
    """Return a lower bound of the seconds of a step in which no copy is waited for."""
    critical_s = tables.backward_critical_s
    whole_s = tables.of_ranks((tables.forward_s + critical_s + tables.kv_recompute_s).sum(axis=1))
    whole_s += tables.reduced_between_s
    deferred_s = tables.of_ranks(tables.weight_s.sum(axis=1) * tables.defers_weights)
    bounds = []
    is_looped = tables.schedule == LOOPED
    if is_looped or len(critical_s) == tables.num_ranks:
        parts = parts_of_step(
            tables.forward_s[None],
            critical_s[None],
            message_bytes=tables.message_bytes,
            links=tables.links,
            reduce_s=tables.reduce_s,
            num_sequences=tables.num_sequences,
            looped_ranks=tables.num_ranks if is_looped else None,
        )
        bounds.append(sum(float(part[0]) for part in parts))
    to_rank, follows = tables.ramp_seconds()
    if not bounds or tables.kv_recompute_s.any():
        bounds.append(float((to_rank + whole_s + follows).max()))
    if tables.defers_weights:
        bounds.append(
            float((to_rank + whole_s + deferred_s + tables.reduce_s[: tables.num_ranks]).max())
        )
    return max(bounds)


def least_copies_s(tables: StepTables, costs: Costs) -> float:
    """Return a lower bound of a step's seconds from copies of activations, K and V; 0 without any.

    Args:
        tables: Tables of the step.
        costs: Costs with the bytes of copies and the rates of the copy engines.
    """
    copied = costs.offload_bytes + costs.kv_offload_bytes
    if not copied.any():
        return 0.0
    bytes_of_ranks = tables.of_ranks(copied.sum(axis=1))
    out_s = bytes_of_ranks / costs.copies.d2h_bytes_per_s
    back_s = bytes_of_ranks / costs.copies.h2d_bytes_per_s
    to_rank, follows = tables.ramp_seconds()
    count = copied.shape[1] // tables.num_sequences
    first_s = tables.of_ranks(tables.forward_s[:, :count].sum(axis=1))
    least = max((to_rank + out_s).max(), (to_rank + first_s + back_s + follows).max())
    if tables.num_sequences == 1 and (tables.schedule == LOOPED or len(copied) == tables.num_ranks):
        # After the last D2H copy run the backwards of all units up to the copied one.
        left = _in_forward_order(copied, tables.num_ranks) > 0
        last = left.shape[1] - 1 - np.argmax(left[:, ::-1], axis=1)
        ends = np.cumsum(_in_forward_order(tables.backward_critical_s, tables.num_ranks), axis=1)
        behind_s = ends[np.arange(tables.num_ranks), last] * left.any(axis=1)
        least = max(least, ((to_rank + out_s + behind_s + follows) * left.any(axis=1)).max())
    return float(least)


def _in_forward_order(table: Table, num_ranks: int) -> Table:
    """Return the table by rank, in the order of forwards, [ranks, stages of a rank x units]."""
    own = table.reshape(-1, num_ranks, table.shape[1]).transpose(1, 0, 2)
    return own.reshape(num_ranks, -1)
