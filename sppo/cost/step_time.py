"""Time of a step in closed form, by which the solver ranks candidates before it simulates a few.

One sequence on p stages is a permutation flow shop in forward, and another one in backward, with
the links between stages as further machines. A machine that takes t[u] for unit u, which is ready
at r[u], ends it at C[u] = P[u] + max over v <= u of (r[v] - P[v-1]), where P are the prefix sums of
t: a single running maximum. For equal units, this gives the paper's (N + p - 1) / N * F(N); for one
sequence without copies, it equals the simulation.

In the looped order the machines are the pipeline ranks; a rank begins a stage when it has finished
its previous one. Every pass over the ranks is a flow shop whose machines and links become free at
known times, so the closed form equals the simulation, too. A group of sequences ends on the first
rank last, and the next group begins there, so the times of groups add up. One stage on each rank is
the looped order in which sequences do not overlap.

In other orders several sequences overlap: then the step takes at least the longest way through one
stage, which serves as its time: the ramp of the first unit down to the stage, all work of the
stage, and the ramp of the last backward up from the stage.

A D2H copy overlaps the next forward; if the copy takes longer, the forward after that waits for
memory. An H2D copy overlaps the backward before its own; if the copy takes longer, its own backward
waits. So in both flow shops a unit takes the longer of its compute and the overlapping copy. The
simulator, which follows copies layer by layer, gives about the same time. Faster copies or links
never make a step slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sppo.hardware.rates import Floats
from sppo.schedule.costs import Costs, Link, Table
from sppo.schedule.orders.steps import sequence_groups

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
    both = np.concatenate([forward, slowed[0]]), np.concatenate([backward, slowed[1]])
    if looped_ranks is None and num_sequences > 1:
        forward_s, backward_s, update_s = _overlapped(*both, costs=first)
    else:
        ranks = looped_ranks or first.num_stages
        forward_s, backward_s, update_s = _looped(
            *both, costs=first, num_sequences=num_sequences, num_ranks=ranks
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


def _overlapped(forward: Table, backward: Table, *, costs: Costs) -> tuple[Floats, Floats, Floats]:
    """Return the parts of the longest way through one stage, for sequences that overlap, [n].

    The way goes with the first forward down to the stage and with the last backward up from it.
    """
    pairs = [(stage, stage + 1) for stage in range(costs.num_stages - 1)]
    down = [costs.links.link(a, receiver=b) for a, b in pairs]
    up = [costs.links.link(b, receiver=a) for a, b in pairs]
    first_bytes = costs.message_bytes[0]
    down_s, up_s = (
        np.array([link.latency_s + first_bytes / link.bytes_per_s for link in links])
        for links in (down, up)
    )
    to_it, from_it = np.zeros((2, *forward.shape[:2]))
    to_it[:, 1:] = np.cumsum(forward[:, :-1, 0] + down_s, axis=1)
    from_it[:, 1:] = np.cumsum(backward[:, :-1, 0] + up_s, axis=1)
    forward_work, backward_work = forward.sum(axis=2), backward.sum(axis=2)
    update = np.maximum.accumulate(costs.reduce_s - from_it, axis=1)
    longest = np.argmax(to_it + forward_work + backward_work + from_it + update, axis=1)
    parts = to_it + forward_work, backward_work + from_it, update
    steps = np.arange(len(forward))
    return parts[0][steps, longest], parts[1][steps, longest], parts[2][steps, longest]


def _looped(
    forward: Table, backward: Table, *, costs: Costs, num_sequences: int, num_ranks: int
) -> tuple[Floats, Floats, Floats]:
    """Return the seconds of all forwards, of all backwards, and of the update after the last, [n].

    Backwards of a rank wait while the rank reduces the gradients of a stage, and until gradients
    that leave the device are complete.

    Args:
        forward: Seconds of the forward of each unit on each stage in n steps, [n, stages, units].
        backward: Seconds of both halves of the backward, [n, stages, units].
        costs: Costs of any of the steps.
        num_sequences: Sequences of the step, all cut alike.
        num_ranks: Pipeline ranks; stage s is on rank s mod `num_ranks`.
    """
    count = forward.shape[2] // num_sequences
    lengths = ((1,) * count,) * num_sequences
    *groups, last = (len(g) for g in sequence_groups(lengths, num_ranks=num_ranks))
    forward_s, backward_s = np.zeros((2, len(forward)))
    ends = np.zeros(forward.shape[:2])
    reduce_s, settled_s = costs.reduce_s, costs.last_reduction_wait_s
    ranks, link = range(num_ranks), costs.links.link
    down = [link((rank - 1) % num_ranks, receiver=rank) for rank in ranks]
    up = [link((rank + 1) % num_ranks, receiver=rank) for rank in reversed(ranks)]
    # A stage is reduced after its last backward, which belongs to the last group.
    for size, times, behind_s in (
        *((size, groups.count(size), settled_s) for size in {*groups}),
        (last, 1, reduce_s),
    ):
        units = np.arange(size * count)
        # Sequences come in their order in both passes, subsequences backward in reverse.
        reverse = units.reshape(size, count)[:, ::-1].ravel()
        down_ends = _flow_ends(
            forward[:, :, units], costs.message_bytes[units], down, behind_s=np.zeros_like(behind_s)
        )
        ends = _flow_ends(
            backward[:, ::-1, reverse], costs.message_bytes[reverse], up, behind_s=behind_s[::-1]
        )[:, ::-1]
        forward_s += times * down_ends[:, -1]
        backward_s += times * ends[:, 0]
    backward_s += len(groups) * float(settled_s[0])
    updated_s = (ends + reduce_s)[:, :num_ranks].max(axis=1)
    return forward_s, backward_s, updated_s - ends[:, 0]


def _flow_ends(
    seconds: Table, message_bytes: Floats, links: Sequence[Link], *, behind_s: Floats
) -> Floats:
    """Return when each stage has ended its last unit, [n, stages], in the order of passing.

    Args:
        seconds: Seconds of each unit on each stage in n steps, [n, stages, units].
        message_bytes: Bytes of the message of each unit, in the order of passing.
        links: Link to each rank from the one before, numbered from the rank where units begin.
        behind_s: Seconds that a rank takes after its last unit of each stage, [stages].
    """
    steps, num_stages, units = seconds.shape
    ranks = len(links)
    free, sent = np.zeros((2, ranks, steps, 1))
    ends, done = np.zeros((steps, num_stages)), np.zeros((steps, units))
    for place in range(num_stages):
        here, before = place % ranks, (place - 1) % ranks
        if place and ranks > 1:
            link = links[here]
            left = _queue_ends(
                np.maximum(done, sent[before]), message_bytes[None] / link.bytes_per_s
            )
            sent[before], done = left[:, -1:], left + link.latency_s
        done = _queue_ends(np.maximum(done, free[here]), seconds[:, place])
        ends[:, place] = done[:, -1]
        free[here] = done[:, -1:] + behind_s[place]
    return ends


def _queue_ends(ready: Floats, seconds: Floats) -> Floats:
    """Return when a machine that serves units in order ends each, [n, units].

    Args:
        ready: When each unit is ready, [n, units].
        seconds: Seconds of each unit, [n, units], or [1, units] in all steps.
    """
    work = np.cumsum(seconds, axis=-1)
    ends: Floats = work + np.maximum.accumulate(ready - (work - seconds), axis=-1)
    return ends
