"""Time of a step of the looped order, in closed form.

The machines of a flow shop (:mod:`sppo.cost.step_time`) are the pipeline ranks; a rank begins a
stage when it has finished its previous one. Every pass over the ranks is a flow shop whose machines
and links become free at known times, so the closed form equals the simulation. A group of sequences
ends on the first rank last, and the next group begins there, so the times of groups add up.
"""

from __future__ import annotations

import numpy as np

from sppo.hardware.rates import Floats
from sppo.schedule.costs import Link, Links, Table
from sppo.schedule.orders.steps import sequence_groups


def looped_parts(
    forward: Table,
    backward: Table,
    *,
    message_bytes: Floats,
    links: Links,
    reduce_s: Floats,
    last_reduction_wait_s: Floats | None,
    num_sequences: int,
    num_ranks: int,
) -> tuple[Floats, Floats, Floats]:
    """Return the seconds of all forwards, of all backwards, and of the update after the last, [n].

    Backwards of a rank wait while the rank reduces the gradients of a stage, and until gradients
    that leave the device are complete.

    Args:
        forward: Seconds of the forward of each unit on each stage in n steps, [n, stages, units].
        backward: Seconds of both halves of the backward, [n, stages, units].
        message_bytes: Bytes of a message between ranks, [units].
        links: Links between ranks.
        reduce_s: Seconds of reducing gradients; of the first stage of each rank also of the update,
            [stages].
        last_reduction_wait_s: Seconds that a rank waits for the last reduction of a stage's
            gradients before they leave the device, in all groups but the last, [stages]; at most a
            backward. None for no waiting.
        num_sequences: Sequences of the step, all cut alike.
        num_ranks: Pipeline ranks; stage s is on rank s mod `num_ranks`.
    """
    count = forward.shape[2] // num_sequences
    lengths = ((1,) * count,) * num_sequences
    *groups, last = (len(g) for g in sequence_groups(lengths, num_ranks=num_ranks))
    forward_s, backward_s = np.zeros((2, len(forward)))
    ends = np.zeros(forward.shape[:2])
    settled_s = np.zeros_like(reduce_s) if last_reduction_wait_s is None else last_reduction_wait_s
    # A stage is reduced after its last backward, which belongs to the last group.
    for size, times, behind_s in (
        *((size, groups.count(size), settled_s) for size in {*groups}),
        (last, 1, reduce_s),
    ):
        units = np.arange(size * count)
        # Sequences come in their order in both passes, subsequences backward in reverse.
        reverse = units.reshape(size, count)[:, ::-1].ravel()
        down = _Flow(message_bytes[units], links, num_ranks=num_ranks, step=1)
        down_ends = down.ends(forward[:, :, units])
        up = _Flow(message_bytes[reverse], links, num_ranks=num_ranks, step=-1)
        ends = up.ends(backward[:, ::-1, reverse], behind_s=behind_s[::-1])[:, ::-1]
        forward_s += times * down_ends[:, -1]
        backward_s += times * ends[:, 0]
    backward_s += len(groups) * float(settled_s[0])
    updated_s = (ends + reduce_s)[:, :num_ranks].max(axis=1)
    return forward_s, backward_s, updated_s - ends[:, 0]


class _Flow:
    """Flow shop of units that pass all stages in order, up or down the ranks.

    Args:
        message_bytes: Bytes of the message of each unit, in the order of passing.
        links: Links between ranks.
        num_ranks: Pipeline ranks.
        step: 1 if units begin on the first rank, -1 if on the last.
    """

    def __init__(self, message_bytes: Floats, links: Links, *, num_ranks: int, step: int) -> None:
        self._bytes, self._links = message_bytes, links
        self._num_ranks, self._step = num_ranks, step

    def ends(self, seconds: Table, *, behind_s: Floats | None = None) -> Floats:
        """Return when each stage has ended its last unit, [n, stages], in the order of passing.

        Args:
            seconds: Seconds of each unit on each stage in n steps, [n, stages, units].
            behind_s: Seconds that a rank takes after its last unit of each stage, [stages]; None
                for 0.
        """
        steps, num_stages, units = seconds.shape
        behind = np.zeros(num_stages) if behind_s is None else behind_s
        ranks = self._num_ranks
        free, sent = np.zeros((2, ranks, steps, 1))
        ends = np.zeros((steps, num_stages))
        done = np.zeros((steps, units))
        links = [self._link((rank - 1) % ranks, rank) for rank in range(ranks)]
        wires = {link: Queue(self._bytes / [[link.bytes_per_s]]) for link in links}
        stages = Queue(seconds)
        for place in range(num_stages):
            here, before = place % ranks, (place - 1) % ranks
            if place and ranks > 1:
                link = links[here]
                left = wires[link].ends(np.maximum(done, sent[before]), 0)
                sent[before], done = left[:, -1:], left + link.latency_s
            done = stages.ends(np.maximum(done, free[here]), place)
            ends[:, place] = done[:, -1]
            free[here] = done[:, -1:] + behind[place]
        return ends

    def _link(self, before: int, here: int) -> Link:
        """Return the link between two neighbours, numbered from the rank where units begin."""
        if self._step < 0:
            before, here = self._num_ranks - 1 - before, self._num_ranks - 1 - here
        return self._links.link(before, receiver=here)


class Queue:
    """Machines that each serve the same units in order.

    Args:
        seconds: Seconds of each unit on each machine, [..., machines, units].
    """

    def __init__(self, seconds: Table) -> None:
        self._work = np.cumsum(seconds, axis=-1)
        self._before = self._work - seconds

    def ends(self, ready: Floats, machine: int) -> Floats:
        """Return the end of each unit, ready at given times, on a machine, [..., units]."""
        begun = np.maximum.accumulate(ready - self._before[..., machine, :], axis=-1)
        ends: Floats = self._work[..., machine, :] + begun
        return ends
