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
from sppo.schedule.graph import Edges, Ints, Standstill, longest_paths
from sppo.schedule.schedule import Schedule
from sppo.schedule.simulation.clock import DeadlockError
from sppo.schedule.step_actions import StepActions

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
        sent, received = actions.of(send), actions.of(receive)
        firsts[received] = _other_ends(actions, received, send, -step * schedule.num_units)
        lone = _other_ends(actions, sent, receive, step * schedule.num_units) == actions.never
        lone = np.append(sent[lone], received[firsts[received] == actions.never])
        for action in lone[:1].tolist():
            raise DeadlockError(
                f"{actions.text(action)}: nobody is at the other end", *actions.place(action)
            )
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
        standing = np.array([service for service, _ in standstill.services])
        last = actions.compute.size - 1
        compute = actions.compute[np.minimum(np.searchsorted(actions.compute, standing), last)]
        same_rank = actions.ranks[compute] == actions.ranks[standing]
        standing = np.where(same_rank, compute, standing)
        shown = "; ".join(map(actions.text, standing[:_SHOWN].tolist()))
        raise DeadlockError(
            f"messages wait for each other with one queue per rank: {shown}",
            *actions.place(int(standing[0])),
        ) from None


def _other_ends(actions: StepActions, messages: Ints, code: int, step: int) -> Ints:
    """Return the actions at the other ends of messages, `never` where there is none."""
    slots = actions.slots[messages] + step
    is_there = (slots >= 0) & (slots < actions.size)
    found = actions.at(code, np.where(is_there, slots, 0), actions.shards[messages])
    return np.where(is_there, found, actions.never)
