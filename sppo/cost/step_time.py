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
    """

    step_s: float
    update_s: float


def step_time(
    costs: Costs,
    *,
    num_sequences: int,
    looped_ranks: int | None = None,
    forward_only_stages: int = 0,
) -> StepTime:
    """Return the time of a step of an SPPO-like schedule with one stage per rank, or looped order.

    Args:
        costs: Costs of every stage and unit.
        num_sequences: Sequences of the step, all cut alike.
        looped_ranks: Pipeline ranks of the looped order; None for one stage per rank.
        forward_only_stages: Number of first stages without backward.
    """
    num_ranks = looped_ranks or costs.num_stages

    def seconds(forward: Table, backward: Table) -> tuple[float, float]:
        if looped_ranks is None and num_sequences > 1:
            return _overlapped(forward, backward, costs=costs, first=forward_only_stages)
        return _looped(
            forward,
            backward,
            costs=costs,
            num_sequences=num_sequences,
            num_ranks=num_ranks,
            first=forward_only_stages,
        )

    forward, backward = costs.forward_s, costs.backward_s + costs.weight_s + costs.kv_recompute_s
    work_s, update_s = seconds(forward, backward)
    slowed_s = 0.0
    # K and V come back during the backward of the following stage, which takes about as long.
    copied = costs.offload_bytes + costs.kv_offload_bytes
    if copied.any():
        by_sequence = (costs.num_stages, num_sequences, -1)
        slowed = _beside_copies(
            *(table.reshape(by_sequence) for table in (forward, backward, copied)),
            engines=costs.copies,
            num_ranks=num_ranks,
        )
        slowed_s = sum(seconds(*(table.reshape(forward.shape) for table in slowed)))
    return StepTime(max(work_s + update_s, slowed_s), update_s)


def _beside_copies(
    forward: Table, backward: Table, copied: Table, *, engines: CopyEngines, num_ranks: int
) -> tuple[Table, Table]:
    """Return the seconds of forwards and backwards, or of the overlapping copy if it is longer.

    The D2H copy of a unit overlaps the next forward, its H2D copy the backward before its own. No
    forward follows the last unit of a sequence on a rank: both of its copies count in full, before
    its backward. A sequence passes all stages of a rank, one after another.

    Args:
        forward: Seconds of forwards, [stages, sequences, units of a sequence].
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
        found[num_ranks:, :, 0] = table[:-num_ranks, :, -1]
        return found

    slow_forward = np.maximum(forward, preceding(out))
    slow_backward = np.maximum(backward, preceding(back))
    slow_backward[-num_ranks:, :, -1] += (out + back)[-num_ranks:, :, -1]
    return slow_forward, slow_backward


def _overlapped(
    forward: Table, backward: Table, *, costs: Costs, first: int
) -> tuple[float, float]:
    """Return the seconds until the last backward ends, and of the update after it.

    They are those of the longest way through one stage: with the first forward down to the stage,
    and with the last backward up from it to stage `first`. Sequences overlap.
    """
    link, message = costs.links.link, costs.message_bytes[0]
    pairs = [(stage, stage + 1) for stage in range(costs.num_stages - 1)]
    to_it, from_it = np.zeros((2, costs.num_stages))
    for way, table, links, silent in (
        (to_it, forward, [link(a, receiver=b) for a, b in pairs], 0),
        (from_it, backward, [link(b, receiver=a) for a, b in pairs], first),
    ):
        sent_s = np.array([each.latency_s + message / each.bytes_per_s for each in links])
        sent_s[:silent] = 0.0
        way[1:] = np.cumsum(table[:-1, 0] + sent_s)
    work_s = to_it + forward.sum(axis=1) + backward.sum(axis=1) + from_it
    update_s = np.maximum.accumulate(costs.reduce_s - from_it)
    longest = np.argmax(work_s + update_s)
    return float(work_s[longest]), float(update_s[longest])


def _looped(
    forward: Table,
    backward: Table,
    *,
    costs: Costs,
    num_sequences: int,
    num_ranks: int,
    first: int,
) -> tuple[float, float]:
    """Return the seconds until the last backward ends, and of the update after it.

    Backwards of a rank wait while the rank reduces the gradients of a stage, and until gradients
    that leave the device are complete.

    Args:
        forward: Seconds of the forward of each unit on each stage, [stages, units].
        backward: Seconds of both halves of the backward, [stages, units].
        costs: Costs of the step.
        num_sequences: Sequences of the step, all cut alike.
        num_ranks: Pipeline ranks; stage s is on rank s mod `num_ranks`.
        first: First stage with a backward.
    """
    count = costs.num_units // num_sequences
    lengths = ((1,) * count,) * num_sequences
    *groups, last = (len(g) for g in sequence_groups(lengths, num_ranks=num_ranks))
    work_s, ends = 0.0, np.zeros(costs.num_stages - first)
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
            forward[:, units], costs.message_bytes[units], down, behind_s=np.zeros_like(behind_s)
        )
        ends = _flow_ends(
            backward[first:][::-1, reverse],
            costs.message_bytes[reverse],
            up,
            behind_s=behind_s[first:][::-1],
        )[::-1]
        work_s += times * float(down_ends[-1] + ends[0])
    work_s += len(groups) * float(settled_s[first])
    return work_s, float((ends + reduce_s[first:])[:num_ranks].max() - ends[0])


def _flow_ends(
    seconds: Table, message_bytes: Floats, links: Sequence[Link], *, behind_s: Floats
) -> Floats:
    """Return when each stage has ended its last unit, [stages], in the order of passing.

    Args:
        seconds: Seconds of each unit on each stage, [stages, units].
        message_bytes: Bytes of the message of each unit, in the order of passing.
        links: Link to each rank from the one before, numbered from the rank where units begin.
        behind_s: Seconds that a rank takes after its last unit of each stage, [stages].
    """
    free, sent = np.zeros((2, len(links)))
    ends, done = np.zeros(len(seconds)), np.zeros(len(message_bytes))
    for place, own_s in enumerate(seconds):
        here, before = place % len(links), (place - 1) % len(links)
        if place and len(links) > 1:
            left = _queue_ends(
                np.maximum(done, sent[before]), message_bytes / links[here].bytes_per_s
            )
            sent[before], done = left[-1], left + links[here].latency_s
        done = _queue_ends(np.maximum(done, free[here]), own_s)
        ends[place] = done[-1]
        free[here] = done[-1] + behind_s[place]
    return ends


def _queue_ends(ready: Floats, seconds: Floats) -> Floats:
    """Return when a machine that serves units in order ends each, [units].

    Args:
        ready: When each unit is ready, [units].
        seconds: Seconds of each unit, [units].
    """
    work = np.cumsum(seconds)
    ends: Floats = work + np.maximum.accumulate(ready - (work - seconds))
    return ends
