"""Time of a step in closed form, by which the solver ranks before it simulates a few.

One sequence on p stages is a permutation flow shop forward, and another one backward, with the
links between stages as further machines. A machine that takes t[u] for unit u once it is ready at
r[u] ends it at C[u] = P[u] + max over v <= u of (r[v] - P[v-1]), with prefix sums P of t: one
running maximum. For equal units it gives the paper's (N + p - 1) / N * F(N), and for one sequence
without copies exactly what the simulator does.

Several sequences overlap: then the step is at least the longest way through one stage, the ramp of
the first unit down to it, all its work, and the ramp of the last backward up from it. In the looped
order they do not overlap (:mod:`sppo.cost.looped_step`).

A copy out that outlasts the forward behind its own holds up the one after that, for which there
would be no room; a copy back that outlasts the backward in front of its own holds up that. So in
both flow shops a unit takes the longer of its compute and the copy beside it. The simulator, which
follows copies layer by layer, comes to about the same, and never to less than
:mod:`sppo.cost.step_bound` says. Faster copies or links never make for a slower step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sppo.cost.looped_step import looped_parts, queue
from sppo.hardware.rates import Floats
from sppo.schedule.costs import Costs, Link, Links, Table


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step.

    Attributes:
        forward_s: Until the last unit has left the last stage; of several sequences, the forward's
            part.
        backward_s: From there to the end of the last backward.
        update_s: From there until gradients are reduced and all optimizers have stepped.
        exposed_copy_s: Waiting for copies that nothing hides.
        busy_s: Compute of all stages together.
    """

    forward_s: float
    backward_s: float
    update_s: float
    exposed_copy_s: float
    busy_s: float

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.forward_s + self.backward_s + self.update_s + self.exposed_copy_s


@dataclass(frozen=True, slots=True, eq=False)
class StageLinks:
    """Links between neighbouring stages, one direction.

    Attributes:
        wire_s: How long each unit occupies the link, [stages - 1, units].
        latency_s: How much later it arrives, [stages - 1].
    """

    wire_s: Table
    latency_s: Table

    @property
    def reversed(self) -> StageLinks:
        """Return the links, last stage and last unit first."""
        return StageLinks(self.wire_s[::-1, ::-1], self.latency_s[::-1])

    def hops_s(self, unit: int) -> Floats:
        """Seconds of one unit alone from each stage to the next, [stages - 1]."""
        hops: Floats = self.wire_s[:, unit] + self.latency_s
        return hops


def step_time(costs: Costs, *, num_sequences: int, looped_ranks: int | None = None) -> StepTime:
    """The step of a schedule of the SPPO family, one stage per rank, or of the looped order.

    Args:
        costs: of every stage and unit.
        num_sequences: of the step, all cut alike.
        looped_ranks: pipeline ranks of the looped order; None for one stage per rank.
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
            settle_s=costs.settle_s,
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
        seconds: of each unit on each stage, [stages, units].
        links: from each stage to the next.
    """
    ends = np.zeros(len(seconds))
    done = np.zeros(seconds.shape[1])
    for stage, row in enumerate(seconds):
        if stage:
            done = queue(done, links.wire_s[stage - 1]) + links.latency_s[stage - 1]
        done = queue(done, row)
        ends[stage] = done[-1]
    return ends


def _beside_copies(
    forward: Table, backward: Table, *, costs: Costs, num_sequences: int, num_ranks: int
) -> tuple[Table, Table]:
    """Seconds of each unit, or of the copy beside it if that is longer.

    A unit leaves during the forward behind its own, and is back after the backward in front of its
    own. Behind the last of a sequence on a rank there is none: it is gone and back before its
    backward. A sequence passes all stages of a rank, each behind the one before.
    """

    def by_sequence(table: Table) -> Table:
        """Return [ranks, sequences, stages of a rank, N], one view of the table."""
        view: Table = table.reshape(-1, num_ranks, num_sequences, count).transpose(1, 2, 0, 3)
        return view

    count = costs.num_units // num_sequences
    num_virtual = costs.num_stages // num_ranks
    # K and V come back beside the stage behind their own, which takes about as long.
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
    settle_s: Floats | None = None,
) -> tuple[float, float, float]:
    """Forward, backward and update one after the other."""
    if looped_ranks is not None:
        return looped_parts(
            forward,
            backward,
            message_bytes=message_bytes,
            links=links,
            reduce_s=reduce_s,
            settle_s=settle_s,
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
    """The longest way through one stage; the first unit leads to it, the last leads from it."""
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
    """Links of activations, which go down, and of gradients, which go up.

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
