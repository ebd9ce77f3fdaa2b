"""How long a step of the looped order takes, in closed form.

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
    num_sequences: int,
    num_ranks: int,
) -> tuple[float, float, float]:
    """Return the seconds of all forwards, of all backwards, and of what follows the last of them.

    Args:
        forward: of each unit on each stage, [stages, units].
        backward: both halves of the same.
        message_bytes: between ranks, [units].
        links: between ranks.
        reduce_s: reducing gradients and the update, [stages].
        num_sequences: of the step, all cut alike.
        num_ranks: pipeline ranks; stage s is on rank s mod `num_ranks`.
    """
    count = forward.shape[1] // num_sequences
    sizes = [len(g) for g in sequence_groups(((1,) * count,) * num_sequences, num_ranks=num_ranks)]
    forward_s = backward_s = 0.0
    ends = np.zeros(len(forward))
    for size in sorted({*sizes}, reverse=True):
        units = np.arange(size * count)
        # Sequences come in their order in both passes, subsequences backward in reverse.
        reverse = units.reshape(size, count)[:, ::-1].ravel()
        down = _Flow(message_bytes[units], links, num_ranks=num_ranks, step=1)
        down_ends = down.ends(forward[:, units])
        up = _Flow(message_bytes[reverse], links, num_ranks=num_ranks, step=-1)
        ends = up.ends(backward[::-1, reverse])[::-1]
        forward_s += sizes.count(size) * float(down_ends[-1])
        backward_s += sizes.count(size) * float(ends[0])
    return forward_s, backward_s, _reduced_s(ends, reduce_s, num_ranks=num_ranks) - float(ends[0])


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

    def ends(self, seconds: Table) -> Floats:
        """When each stage has ended its last unit, [stages], in the order in which they pass."""
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
            free[here] = ends[place] = done[-1]
        return ends

    def _link(self, before: int, here: int) -> Link:
        """Return the link between two neighbours, counted from the rank where units begin."""
        if self._step < 0:
            before, here = self._num_ranks - 1 - before, self._num_ranks - 1 - here
        return self._links.link(before, receiver=here)


def _reduced_s(ends: Floats, reduce_s: Floats, *, num_ranks: int) -> float:
    """Return when all gradients are reduced: each rank's stages one after the other, last first."""
    free = np.zeros(num_ranks)
    for first in reversed(range(0, len(ends), num_ranks)):
        own = slice(first, first + num_ranks)
        free = np.maximum(free, ends[own]) + reduce_s[own]
    return float(free.max())


def queue(ready: Floats, seconds: Floats) -> Floats:
    """Return when a machine that serves units in order ends each of them."""
    work = np.cumsum(seconds)
    ends: Floats = work + np.maximum.accumulate(ready - (work - seconds))
    return ends
