"""Time of a step in closed form, by which the solver ranks candidates before it simulates a few.

One sequence on p stages is a permutation flow shop in forward, and another one in backward, with
the links between stages as further machines. A machine that takes t[u] for unit u, which is ready
at r[u], ends it at C[u] = P[u] + max over v <= u of (r[v] - P[v-1]), where P are the prefix sums of
t: a single running maximum. For equal units, this gives the paper's (N + p - 1) / N * F(N); for one
sequence without copies, it equals the simulation.

Several sequences overlap: then the step takes at least the longest way through one stage, which
serves as its time: the ramp of the first unit down to the stage, all work of the stage, and the
ramp of the last backward up from the stage. In the looped order, sequences do not overlap
(:mod:`sppo.cost.looped_step`).

A D2H copy overlaps the next forward; if the copy takes longer, the forward after that waits for
memory. An H2D copy overlaps the backward before its own; if the copy takes longer, its own backward
waits. So in both flow shops a unit takes the longer of its compute and the overlapping copy. The
simulator, which follows copies layer by layer, gives about the same time, and never less than
:mod:`sppo.cost.step_bound`. Faster copies or links never make a step slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sppo.cost.looped_step import Queue, looped_parts
from sppo.hardware.rates import Floats
from sppo.schedule.costs import Costs, Link, Links, Table


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step, divided into consecutive parts.

    Attributes:
        forward_s: Time until the last unit has left the last stage; if several sequences overlap,
            the time attributed to forwards.
        backward_s: Time from the end of the forwards to the end of the last backward.
        update_s: Time from the last backward until gradients are reduced and all optimizers have
            stepped.
        exposed_copy_s: Time that compute waits for copies.
        busy_s: Compute seconds of all stages together.
    """

    forward_s: float
    backward_s: float
    update_s: float
    exposed_copy_s: float
    busy_s: float

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return self.forward_s + self.backward_s + self.update_s + self.exposed_copy_s


@dataclass(frozen=True, slots=True, eq=False)
class StageLinks:
    """Links between neighbouring stages, one direction.

    Attributes:
        wire_s: Seconds that each unit occupies the link, [stages - 1, units].
        latency_s: Seconds from the end of occupation to arrival, [stages - 1].
    """

    wire_s: Table
    latency_s: Table

    @property
    def reversed(self) -> StageLinks:
        """The same links with stages and units in reverse order."""
        return StageLinks(self.wire_s[::-1, ::-1], self.latency_s[::-1])

    def hops_s(self, unit: int) -> Floats:
        """Return the seconds of a single unit from each stage to the next, [stages - 1]."""
        hops: Floats = self.wire_s[:, unit] + self.latency_s
        return hops


def step_time(costs: Costs, *, num_sequences: int, looped_ranks: int | None = None) -> StepTime:
    """Return the time of a step of an SPPO-like schedule with one stage per rank, or looped order.

    Args:
        costs: Costs of every stage and unit.
        num_sequences: Sequences of the step, all cut alike.
        looped_ranks: Pipeline ranks of the looped order; None for one stage per rank.
    """
    forward = costs.forward_s
    backward = costs.backward_s + costs.weight_s + costs.kv_recompute_s

    def parts(forward: Table, backward: Table) -> tuple[float, float, float]:
        return parts_of_step(
            forward,
            backward,
            message_bytes=costs.message_bytes,
            links=costs.links,
            reduce_s=costs.reduce_s,
            last_reduction_wait_s=costs.last_reduction_wait_s,
            num_sequences=num_sequences,
            looped_ranks=looped_ranks,
        )

    computed = parts(forward, backward)
    exposed = 0.0
    if costs.offload_bytes.any() or costs.kv_offload_bytes.any():
        slowed = _beside_copies(
            forward,
            backward,
            costs=costs,
            num_sequences=num_sequences,
            num_ranks=looped_ranks or costs.num_stages,
        )
        if any(
            (after != before).any()
            for after, before in zip(slowed, (forward, backward), strict=True)
        ):
            exposed = max(0.0, sum(parts(*slowed)) - sum(computed))
    return StepTime(*computed, exposed_copy_s=exposed, busy_s=float(forward.sum() + backward.sum()))


def flow_ends(seconds: Table, *, links: StageLinks) -> Floats:
    """Return when each stage of a permutation flow shop has ended its last unit, [stages].

    Args:
        seconds: Seconds of each unit on each stage, [stages, units].
        links: Links from each stage to the next.
    """
    ends = np.zeros(len(seconds))
    done = np.zeros(seconds.shape[1])
    stages, wires = Queue(seconds), Queue(links.wire_s)
    for stage in range(len(seconds)):
        if stage:
            done = wires.ends(done, stage - 1) + links.latency_s[stage - 1]
        done = stages.ends(done, stage)
        ends[stage] = done[-1]
    return ends


def _beside_copies(
    forward: Table, backward: Table, *, costs: Costs, num_sequences: int, num_ranks: int
) -> tuple[Table, Table]:
    """Return the seconds of each forward and backward, or of the overlapping copy if longer.

    The D2H copy of a unit overlaps the next forward, its H2D copy the backward before its own. No
    forward follows the last unit of a sequence on a rank: both of its copies count in full, before
    its backward. A sequence passes all stages of a rank, one after another.
    """

    def by_sequence(table: Table) -> Table:
        """Return a view of the table as [ranks, sequences, stages of a rank, N]."""
        view: Table = table.reshape(-1, num_ranks, num_sequences, count).transpose(1, 2, 0, 3)
        return view

    count = costs.num_units // num_sequences
    num_virtual = costs.num_stages // num_ranks
    # K and V come back during the backward of the following stage, which takes about as long.
    copied = costs.offload_bytes + costs.kv_offload_bytes
    offloaded = by_sequence(copied).reshape(num_ranks, num_sequences, -1)
    out, back = offloaded / costs.copies.d2h_bytes_per_s, offloaded / costs.copies.h2d_bytes_per_s
    forward, backward = (
        by_sequence(table).reshape(offloaded.shape).copy() for table in (forward, backward)
    )
    forward[:, :, 1:] = np.maximum(forward[:, :, 1:], out[:, :, :-1])
    backward[:, :, 1:] = np.maximum(backward[:, :, 1:], back[:, :, :-1])
    backward[:, :, -1] += out[:, :, -1] + back[:, :, -1]

    def by_stage(table: Table) -> Table:
        table = table.reshape(num_ranks, num_sequences, num_virtual, count)
        return table.transpose(2, 0, 1, 3).reshape(costs.offload_bytes.shape)

    return by_stage(forward), by_stage(backward)


def parts_of_step(
    forward: Table,
    backward: Table,
    *,
    message_bytes: Floats,
    links: Links,
    reduce_s: Floats,
    num_sequences: int,
    looped_ranks: int | None,
    last_reduction_wait_s: Floats | None = None,
) -> tuple[float, float, float]:
    """Return the seconds of the forward, backward and update parts of a step, without copies."""
    if looped_ranks is not None:
        return looped_parts(
            forward,
            backward,
            message_bytes=message_bytes,
            links=links,
            reduce_s=reduce_s,
            last_reduction_wait_s=last_reduction_wait_s,
            num_sequences=num_sequences,
            num_ranks=looped_ranks,
        )
    down, up = stage_wires(links, message_bytes=message_bytes, num_stages=len(forward))
    if num_sequences > 1:
        return _overlapped(forward, backward, down=down, up=up, reduce_s=reduce_s)
    forward_s = float(flow_ends(forward, links=down)[-1])
    ends = flow_ends(backward[::-1, ::-1], links=up.reversed)[::-1]
    return forward_s, float(ends[0]), float((ends + reduce_s).max() - ends[0])


def _overlapped(
    forward: Table, backward: Table, *, down: StageLinks, up: StageLinks, reduce_s: Table
) -> tuple[float, float, float]:
    """Return the parts of the longest way through one stage, for sequences that overlap.

    The way goes with the first forward down to the stage and with the last backward up from it.
    """
    to_it = np.concatenate([[0.0], np.cumsum(forward[:-1, 0] + down.hops_s(0))])
    from_it = np.concatenate([[0.0], np.cumsum(backward[:-1, 0] + up.hops_s(0))])
    forward_work, backward_work = forward.sum(axis=1), backward.sum(axis=1)
    update = np.maximum.accumulate(reduce_s - from_it)
    longest = int(np.argmax(to_it + forward_work + backward_work + from_it + update))
    return (
        float(to_it[longest] + forward_work[longest]),
        float(backward_work[longest] + from_it[longest]),
        float(update[longest]),
    )


def stage_wires(
    links: Links, *, message_bytes: Floats, num_stages: int
) -> tuple[StageLinks, StageLinks]:
    """Return the links of activations (down) and of gradients (up) between neighbouring stages.

    Row s is the link between stages s and s + 1.
    """
    pairs = [(stage, stage + 1) for stage in range(num_stages - 1)]
    return (
        _stage_links([links.link(a, receiver=b) for a, b in pairs], message_bytes),
        _stage_links([links.link(b, receiver=a) for a, b in pairs], message_bytes),
    )


def _stage_links(links: Sequence[Link], message_bytes: Floats) -> StageLinks:
    rates = np.array([link.bytes_per_s for link in links])
    return StageLinks(message_bytes / rates[:, None], np.array([link.latency_s for link in links]))
