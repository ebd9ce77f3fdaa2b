"""Proof that a lowered program cannot deadlock: the graph of its waits has no cycle.

The model is stricter than any transport. A host walks its program; SEND and RECV are appended to
the only queue of the rank and the host walks on; the host stops at a compute action until that
queue is empty. A message moves when it is at the head of both its sender's queue and its receiver's
queue. So each rank runs its compute and its messages one after the other. Both ends of a message
happen at once, and so do the shards of a unit.

Compute waits for messages of other actions, too, because the first launch of a kernel on a GPU may
load its code, which waits until all that was issued before has ended, messages included; so does an
allocation that finds no memory.
"""

from __future__ import annotations

import numpy as np

from sppo.schedule.encoding import KV, RECV_ACT, RECV_GRAD, SEND_ACT, SEND_GRAD, B, F, W
from sppo.schedule.graph import Edges, Standstill, longest_paths
from sppo.schedule.schedule import Schedule
from sppo.schedule.simulation.clock import DeadlockError

_SHOWN = 4


def check_deadlock_free(schedule: Schedule) -> None:
    """Raise DeadlockError unless `schedule`, with its messages placed, runs to its end.

    Args:
        schedule: Schedule in which every message has both ends
            (:mod:`sppo.schedule.checks.validate`).

    Raises:
        DeadlockError: Messages that wait for each other; the message names where the first ranks
            wait.
    """
    actions = schedule.actions
    # What happens at once waits as one action, the first of it, for all that precedes any of it.
    firsts = np.arange(actions.never + 1)
    shards, first_shards = actions.first_shards()
    firsts[shards] = first_shards
    for send, receive, step in ((SEND_ACT, RECV_ACT, 1), (SEND_GRAD, RECV_GRAD, -1)):
        received = actions.of(receive)
        senders = actions.slots[received] - step * schedule.num_units
        firsts[received] = actions.at(send, senders, actions.shards[received])
    queued = actions.of(F, B, W, KV, SEND_ACT, SEND_GRAD, RECV_ACT, RECV_GRAD)
    follows = np.flatnonzero(np.diff(actions.ranks[queued]) == 0)
    joined = np.flatnonzero(firsts != np.arange(firsts.size))
    edges = Edges.joined(
        [
            Edges.of(queued[follows], firsts[queued[follows + 1]]),
            Edges.of(firsts[joined], joined),
        ]
    )
    try:
        longest_paths(
            edges,
            seconds=np.zeros(firsts.size),
            ranks=actions.ranks,
            turns=np.arange(firsts.size),
        )
    except Standstill as standstill:
        shown = "; ".join(actions.text(service) for service, _ in standstill.services[:_SHOWN])
        raise DeadlockError(
            f"messages wait for each other with one queue per rank: {shown}",
            *actions.place(standstill.services[0][0]),
        ) from None
