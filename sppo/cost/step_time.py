"""Time of a step in closed form, by which the solver ranks candidates before it simulates a few.

One sequence on p stages is a permutation flow shop in forward, and another one in backward, with
the links between stages as further machines. A machine that takes t[u] for unit u, which is ready
at r[u], ends it at C[u] = P[u] + max over v <= u of (r[v] - P[v-1]), where P are the prefix sums of
t: a single running maximum. For equal units, this gives the paper's (N + p - 1) / N * F(N); for one
sequence without copies, it equals the simulation. It is the looped order with a stage on each rank
(:mod:`sppo.cost.looped_step`), in which sequences do not overlap.

Several sequences overlap: then the step takes at least the longest way through one stage, which
serves as its time: the ramp of the first unit down to the stage, all work of the stage, and the
ramp of the last backward up from the stage.

A D2H copy overlaps the next forward; if the copy takes longer, the forward after that waits for
memory. An H2D copy overlaps the backward before its own; if the copy takes longer, its own backward
waits. So in both flow shops a unit takes the longer of its compute and the overlapping copy. The
simulator, which follows copies layer by layer, gives about the same time. Faster
copies or links never make a step slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sppo.cost.looped_step import looped_parts
from sppo.hardware.rates import Floats
from sppo.schedule.costs import Costs, Link, Links, Table

Indices = npt.NDArray[np.intp]


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


def step_time(costs: Costs, *, num_sequences: int, looped_ranks: int | None = None) -> StepTime:
    """Return the time of a step of an SPPO-like schedule with one stage per rank, or looped order.

    Args:
        costs: Costs of every stage and unit.
        num_sequences: Sequences of the step, all cut alike.
        looped_ranks: Pipeline ranks of the looped order; None for one stage per rank.
    """
    return step_times([costs], num_sequences=num_sequences, looped_ranks=looped_ranks)[0]


def step_times(
    costs: Sequence[Costs], *, num_sequences: int, looped_ranks: int | None = None
) -> list[StepTime]:
    """Return :func:`step_time` of steps that differ in the placement of activations alone."""
    first = costs[0]
    forward = np.stack([one.forward_s for one in costs])
    backward = np.stack([one.backward_s for one in costs])
    backward = backward + first.weight_s + first.kv_recompute_s
    waiting, slowed = _beside_copies(
        forward,
        backward,
        costs=costs,
        num_sequences=num_sequences,
        num_ranks=looped_ranks or first.num_stages,
    )
    forward_s, backward_s, update_s = parts_of_step(
        np.concatenate([forward, slowed[0]]),
        np.concatenate([backward, slowed[1]]),
        message_bytes=first.message_bytes,
        links=first.links,
        reduce_s=first.reduce_s,
        last_reduction_wait_s=first.last_reduction_wait_s,
        num_sequences=num_sequences,
        looped_ranks=looped_ranks,
    )
    whole_s, exposed_s = forward_s + backward_s + update_s, np.zeros(len(costs))
    exposed_s[waiting] = np.maximum(0.0, whole_s[len(costs) :] - whole_s[waiting])
    return [
        StepTime(
            float(forward_s[step]),
            float(backward_s[step]),
            float(update_s[step]),
            exposed_copy_s=float(exposed_s[step]),
            busy_s=float(forward[step].sum() + backward[step].sum()),
        )
        for step in range(len(costs))
    ]


def _beside_copies(
    forward: Table,
    backward: Table,
    *,
    costs: Sequence[Costs],
    num_sequences: int,
    num_ranks: int,
) -> tuple[Indices, tuple[Table, Table]]:
    """Return which steps wait for copies, and the seconds of their units or of longer copies.

    The D2H copy of a unit overlaps the next forward, its H2D copy the backward before its own. No
    forward follows the last unit of a sequence on a rank: both of its copies count in full, before
    its backward. A sequence passes all stages of a rank, one after another.

    Returns:
        Indices of the steps, [m], and the seconds of their forwards and of their backwards, or of
        the overlapping copy if longer, [m, stages, units] each.
    """
    first = costs[0]
    # K and V come back during the backward of the following stage, which takes about as long.
    copied = [one.offload_bytes + first.kv_offload_bytes for one in costs]
    copying = [step for step, table in enumerate(copied) if table.any()]
    if not copying:
        return np.zeros(0, dtype=np.intp), (forward[:0], backward[:0])
    count, num_virtual = first.num_units // num_sequences, first.num_stages // num_ranks

    def by_sequence(table: Table) -> Table:
        """Return a copy of the table as [m, ranks, sequences, units of all stages of a rank]."""
        stages = table.reshape(-1, num_virtual, num_ranks, num_sequences, count)
        ranks = stages.transpose(0, 2, 3, 1, 4)
        return ranks.reshape(-1, num_ranks, num_sequences, num_virtual * count).copy()

    def by_stage(table: Table) -> Table:
        ranks = table.reshape(-1, num_ranks, num_sequences, num_virtual, count)
        return ranks.transpose(0, 3, 1, 2, 4).reshape(-1, *forward.shape[1:])

    offloaded = by_sequence(np.stack([copied[step] for step in copying]))
    out, back = offloaded / first.copies.d2h_bytes_per_s, offloaded / first.copies.h2d_bytes_per_s
    own_forward, own_backward = by_sequence(forward[copying]), by_sequence(backward[copying])
    slow_forward, slow_backward = own_forward.copy(), own_backward.copy()
    slow_forward[..., 1:] = np.maximum(slow_forward[..., 1:], out[..., :-1])
    slow_backward[..., 1:] = np.maximum(slow_backward[..., 1:], back[..., :-1])
    slow_backward[..., -1] += out[..., -1] + back[..., -1]
    differs = (slow_forward != own_forward) | (slow_backward != own_backward)
    waits = differs.any(axis=(1, 2, 3))
    waiting: Indices = np.array(copying, dtype=np.intp)[waits]
    return waiting, (by_stage(slow_forward[waits]), by_stage(slow_backward[waits]))


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
) -> tuple[Floats, Floats, Floats]:
    """Return the seconds of the forward, backward and update parts of steps without copies, [n].

    Args:
        forward: Seconds of the forward of each unit on each stage in n steps, [n, stages, units].
        backward: Seconds of both halves of the backward, [n, stages, units].
        message_bytes: Bytes of a message between stages, [units].
        links: Links between ranks.
        reduce_s: Seconds of reductions and update, [stages].
        num_sequences: Sequences of a step, all cut alike.
        looped_ranks: Pipeline ranks of the looped order; None for one stage per rank.
        last_reduction_wait_s: See :func:`sppo.cost.looped_step.looped_parts`.
    """
    if looped_ranks is None and num_sequences > 1:
        hops_s = _hops_s(links, message_bytes[0], num_stages=forward.shape[1])
        return _overlapped(forward, backward, hops_s, reduce_s)
    return looped_parts(
        forward,
        backward,
        message_bytes=message_bytes,
        links=links,
        reduce_s=reduce_s,
        last_reduction_wait_s=last_reduction_wait_s,
        num_sequences=num_sequences,
        num_ranks=looped_ranks or forward.shape[1],
    )


def _overlapped(
    forward: Table, backward: Table, hops_s: tuple[Floats, Floats], reduce_s: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return the parts of the longest way through one stage, for sequences that overlap, [n].

    The way goes with the first forward down to the stage and with the last backward up from it.
    """
    to_it, from_it = np.zeros((2, *forward.shape[:2]))
    to_it[:, 1:] = np.cumsum(forward[:, :-1, 0] + hops_s[0], axis=1)
    from_it[:, 1:] = np.cumsum(backward[:, :-1, 0] + hops_s[1], axis=1)
    forward_work, backward_work = forward.sum(axis=2), backward.sum(axis=2)
    update = np.maximum.accumulate(reduce_s - from_it, axis=1)
    longest = np.argmax(to_it + forward_work + backward_work + from_it + update, axis=1)
    parts = to_it + forward_work, backward_work + from_it, update
    steps = np.arange(len(forward))
    return parts[0][steps, longest], parts[1][steps, longest], parts[2][steps, longest]


def _hops_s(links: Links, num_bytes: float, *, num_stages: int) -> tuple[Floats, Floats]:
    """Return the seconds of a message between neighbours, down and up, [stages - 1] each."""
    pairs = [(stage, stage + 1) for stage in range(num_stages - 1)]
    down = [links.link(a, receiver=b) for a, b in pairs]
    up = [links.link(b, receiver=a) for a, b in pairs]
    return _message_s(down, num_bytes), _message_s(up, num_bytes)


def _message_s(links: Sequence[Link], num_bytes: float) -> Floats:
    return np.array([link.latency_s + num_bytes / link.bytes_per_s for link in links])
