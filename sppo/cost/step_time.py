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

from sppo.hardware.rates import Floats
from sppo.schedule.costs import CopyEngines, Costs, Link, Table
from sppo.schedule.orders.rank_orders import sequence_groups


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step.

    Attributes:
        step_s: Time of the whole step.
        update_s: Time from the last backward until gradients are reduced and all optimizers have
            stepped.
        exposed_copy_s: Time that compute waits for copies.
    """

    step_s: float
    update_s: float
    exposed_copy_s: float


def step_times(
    costs: Sequence[Costs], *, num_sequences: int, looped_ranks: int | None = None
) -> list[StepTime]:
    """Return the times of steps that differ in the placement of activations alone.

    The schedule is an SPPO-like one with one stage per rank, or the looped order.

    Args:
        costs: Costs of every stage and unit, for each step.
        num_sequences: Sequences of the step, all cut alike.
        looped_ranks: Pipeline ranks of the looped order; None for one stage per rank.
    """
    first, ranks = costs[0], looped_ranks or costs[0].num_stages

    def seconds(forward: Table, backward: Table) -> tuple[Floats, Floats]:
        if looped_ranks is None and num_sequences > 1:
            return _overlapped(forward, backward, costs=first)
        return _looped(forward, backward, costs=first, num_sequences=num_sequences, num_ranks=ranks)

    forward = np.stack([one.forward_s for one in costs])
    backward = np.stack([one.backward_s + first.weight_s + first.kv_recompute_s for one in costs])
    # K and V come back during the backward of the following stage, which takes about as long.
    copied = np.stack([one.offload_bytes + first.kv_offload_bytes for one in costs])
    work_s, update_s = seconds(forward, backward)
    step_s = slowed_s = work_s + update_s
    if copied.any():
        by_sequence = (*forward.shape[:2], num_sequences, -1)
        slowed = _beside_copies(
            *(table.reshape(by_sequence) for table in (forward, backward, copied)),
            engines=first.copies,
            num_ranks=ranks,
        )
        until_update_s, rest_s = seconds(*(table.reshape(forward.shape) for table in slowed))
        slowed_s = until_update_s + rest_s
    exposed_s = np.maximum(0.0, slowed_s - step_s)
    rows = zip(*map(np.ndarray.tolist, (step_s + exposed_s, update_s, exposed_s)), strict=True)
    return [StepTime(*row) for row in rows]


def _beside_copies(
    forward: Table, backward: Table, copied: Table, *, engines: CopyEngines, num_ranks: int
) -> tuple[Table, Table]:
    """Return the seconds of forwards and backwards, or of the overlapping copy if it is longer.

    The D2H copy of a unit overlaps the next forward, its H2D copy the backward before its own. No
    forward follows the last unit of a sequence on a rank: both of its copies count in full, before
    its backward. A sequence passes all stages of a rank, one after another.

    Args:
        forward: Seconds of forwards in n steps, [n, stages, sequences, units of a sequence].
        backward: Seconds of both halves of backwards, like `forward`.
        copied: Bytes that each unit offloads, like `forward`.
        engines: Copy engines.
        num_ranks: Pipeline ranks; stage s is on rank s mod `num_ranks`.
    """
    out, back = copied / engines.d2h_bytes_per_s, copied / engines.h2d_bytes_per_s

    def preceding(table: Table) -> Table:
        """Return the value of the unit that precedes each unit of a sequence on its rank, or 0."""
        found = np.zeros_like(table)
        found[..., 1:] = table[..., :-1]
        found[:, num_ranks:, :, 0] = table[:, :-num_ranks, :, -1]
        return found

    slow_forward = np.maximum(forward, preceding(out))
    slow_backward = np.maximum(backward, preceding(back))
    slow_backward[:, -num_ranks:, :, -1] += (out + back)[:, -num_ranks:, :, -1]
    return slow_forward, slow_backward


def _overlapped(forward: Table, backward: Table, *, costs: Costs) -> tuple[Floats, Floats]:
    """Return the seconds of the longest way through one stage, for sequences that overlap, [n].

    The way goes with the first forward down to the stage and with the last backward up from it.

    Returns:
        Seconds until the last backward ends, and of the update after it.
    """
    link, message = costs.links.link, costs.message_bytes[0]
    pairs = [(stage, stage + 1) for stage in range(costs.num_stages - 1)]
    to_it, from_it = np.zeros((2, *forward.shape[:2]))
    for way, table, links in (
        (to_it, forward, [link(a, receiver=b) for a, b in pairs]),
        (from_it, backward, [link(b, receiver=a) for a, b in pairs]),
    ):
        sent_s = np.array([each.latency_s + message / each.bytes_per_s for each in links])
        way[:, 1:] = np.cumsum(table[:, :-1, 0] + sent_s, axis=1)
    work_s = to_it + forward.sum(axis=2) + backward.sum(axis=2) + from_it
    update_s = np.maximum.accumulate(costs.reduce_s - from_it, axis=1)
    longest = np.arange(len(forward)), np.argmax(work_s + update_s, axis=1)
    return work_s[longest], update_s[longest]


def _looped(
    forward: Table, backward: Table, *, costs: Costs, num_sequences: int, num_ranks: int
) -> tuple[Floats, Floats]:
    """Return the seconds until the last backward ends, and of the update after it, [n].

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
    work_s, ends = np.zeros(len(forward)), np.zeros(forward.shape[:2])
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
        work_s += times * (down_ends[:, -1] + ends[:, 0])
    work_s += len(groups) * float(settled_s[0])
    updated_s = (ends + reduce_s)[:, :num_ranks].max(axis=1)
    return work_s, updated_s - ends[:, 0]


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
