"""Time of a step of the looped order, in closed form.

A machine is a pipeline rank, which takes up a stage when it is done with the one before. So stage
after stage is a flow shop (:mod:`sppo.cost.step_time`) whose machines and links are free from a
moment on that is known: exactly what the simulator does. A group of sequences ends on the first
rank, where the next one begins, later than on any other, so groups add up.
"""

from __future__ import annotations

import numpy as np

from sppo.hardware.rates import Floats
from sppo.schedule.costs import Link, Links, Table
from sppo.schedule.orders import sequence_groups


def looped_parts(
    forward: Table,
    backward: Table,
    *,
    message_bytes: Floats,
    links: Links,
    reduce_s: Floats,
    settle_s: Floats | None,
    num_sequences: int,
    num_ranks: int,
) -> tuple[float, float, float]:
    """Return the seconds of all forwards, of all backwards, and of what follows the last of them.

    Backwards of a rank wait while it reduces the gradients of a stage, and for those that leave.

    Args:
        forward: of each unit on each stage, [stages, units].
        backward: both halves of the same.
        message_bytes: between ranks, [units].
        links: between ranks.
        reduce_s: reducing gradients; with the first stage of each rank also the update, [stages].
        settle_s: what a rank waits for where gradients leave that are added to once more, no longer
            than a backward, [stages]; None: nothing.
        num_sequences: of the step, all cut alike.
        num_ranks: pipeline ranks; stage s is on rank s mod `num_ranks`.
    """
    count = forward.shape[1] // num_sequences
    lengths = ((1,) * count,) * num_sequences
    *groups, last = (len(g) for g in sequence_groups(lengths, num_ranks=num_ranks))
    forward_s = backward_s = 0.0
    ends = np.zeros(len(forward))
    settled_s = np.zeros_like(reduce_s) if settle_s is None else settle_s
    # Stages are reduced when their last backward has run, which is one of the last group.
    for size, times, behind_s in (
        *((size, groups.count(size), settled_s) for size in {*groups}),
        (last, 1, reduce_s),
    ):
        units = np.arange(size * count)
        # Sequences come in their order in both passes, subsequences backward in reverse.
        reverse = units.reshape(size, count)[:, ::-1].ravel()
        down = _Flow(message_bytes[units], links, num_ranks=num_ranks, step=1)
        down_ends = down.ends(forward[:, units])
        up = _Flow(message_bytes[reverse], links, num_ranks=num_ranks, step=-1)
        ends = up.ends(backward[::-1, reverse], behind_s=behind_s[::-1])[::-1]
        forward_s += times * float(down_ends[-1])
        backward_s += times * float(ends[0])
    backward_s += len(groups) * float(settled_s[0])
    updated_s = float((ends + reduce_s)[:num_ranks].max())
    return forward_s, backward_s, updated_s - float(ends[0])


class _Flow:
    """Units that pass stage after stage, up or down the ranks.

    Args:
        message_bytes: of each unit, in the order in which they pass.
        links: between ranks.
        num_ranks: pipeline ranks.
        step: 1 from the first rank on, -1 from the last one.
    """

    def __init__(self, message_bytes: Floats, links: Links, *, num_ranks: int, step: int) -> None:
        self._bytes, self._links = message_bytes, links
        self._num_ranks, self._step = num_ranks, step

    def ends(self, seconds: Table, *, behind_s: Floats | None = None) -> Floats:
        """Return when each stage has ended its last unit, [stages], in the order of passing.

        Args:
            seconds: of each unit, [stages, units].
            behind_s: that a rank takes behind its last unit of each stage, [stages]; None: nothing.
        """
        behind = np.zeros(len(seconds)) if behind_s is None else behind_s
        ranks = self._num_ranks
        free, sent = np.zeros(ranks), np.zeros(ranks)
        ends = np.zeros(len(seconds))
        done = np.zeros(seconds.shape[1])
        for place, row in enumerate(seconds):
            here, before = place % ranks, (place - 1) % ranks
            if place and ranks > 1:
                link = self._link(before, here)
                wire_s = self._bytes / link.bytes_per_s
                left = queue(np.maximum(done, sent[before]), wire_s)
                sent[before], done = left[-1], left + link.latency_s
            done = queue(np.maximum(done, free[here]), row)
            ends[place] = done[-1]
            free[here] = done[-1] + behind[place]
        return ends

    def _link(self, before: int, here: int) -> Link:
        """Return the link between two neighbours, counted from the rank where units begin."""
        if self._step < 0:
            before, here = self._num_ranks - 1 - before, self._num_ranks - 1 - here
        return self._links.link(before, receiver=here)


def queue(ready: Floats, seconds: Floats) -> Floats:
    """Return when a machine that serves units in order ends each of them."""
    work = np.cumsum(seconds)
    ends: Floats = work + np.maximum.accumulate(ready - (work - seconds))
    return ends
