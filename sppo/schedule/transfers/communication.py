"""Placement of the sends and receives of a program.

A SEND comes directly after the action that makes the tensor. The place of the RECV decides whether
the program can deadlock. If each RECV is placed directly before its consumer (the obvious
lowering), receives of two neighbours can wait for each other as soon as several messages share a
queue. If each RECV is placed at the moment of its SEND, in one global order of simulated time, all
ranks see all messages in the same order, so even a single queue per rank makes progress:
`checks.validate.check_deadlock_free` proves it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sppo.schedule.costs import Costs, abstract_costs
from sppo.schedule.encoding import (
    NUM_COMPUTE,
    RECV_ACT,
    RECV_GRAD,
    SEND_ACT,
    SEND_GRAD,
    B,
    EncodedProgram,
    F,
)
from sppo.schedule.graph import Ints
from sppo.schedule.messages import needed_messages
from sppo.schedule.schedule import Schedule
from sppo.schedule.simulation.clock import run_clock

_WIRES = ((F, SEND_ACT, RECV_ACT, 1), (B, SEND_GRAD, RECV_GRAD, -1))
"""Compute that makes a tensor, SEND and RECV of the tensor, and the step to the stage that needs
it."""


def place_messages(schedule: Schedule, *, costs: Costs | None = None) -> Schedule:
    """Return `schedule` with a SEND and a RECV for every tensor that crosses ranks.

    Each RECV is placed at the moment of its SEND, in one global order of simulated time.

    Args:
        schedule: A valid schedule without messages.
        costs: Costs with which the order is simulated, the same on every rank; unit costs if not
            given.

    Raises:
        DeadlockError: Ranks wait for each other.
    """
    actions = schedule.actions
    turns = _turns(schedule, costs=costs)
    # Actions that are not compute go with the compute action after them.
    own = np.full(actions.never, (schedule.num_ranks + 1) * (actions.never + 1))
    at = actions.codes[actions.compute], actions.slots[actions.compute]
    own[actions.compute] = turns[at] + actions.ranks[actions.compute] * (actions.never + 1)
    own = np.minimum.accumulate(own[::-1])[::-1] - actions.ranks[:-1] * (actions.never + 1)
    programs, ranks, when = [*schedule.encoded], [actions.ranks[:-1]], [own]
    for made, send, receive, step in _WIRES:
        messages = needed_messages(schedule, code=send)
        messages = messages.where(turns[made, messages.slots] < actions.never)
        for code, names, ends in (
            (send, messages.slots, messages.senders),
            (receive, messages.slots + step * schedule.num_units, messages.receivers),
        ):
            columns = np.full_like(names, code), names, messages.numbers, messages.counts
            programs.append(EncodedProgram(*(column.astype(np.int32) for column in columns)))
            ranks.append(ends)
            when.append(turns[made, messages.slots])
    joined, of_ranks = EncodedProgram.joined(programs), np.concatenate(ranks)
    # Of one turn, messages come last.
    ties = joined.shards + actions.never
    ties[: actions.never] = np.arange(actions.never)
    order = np.lexsort((ties, np.concatenate(when), of_ranks))
    ends = np.searchsorted(of_ranks[order], np.arange(schedule.num_ranks), side="right")
    encoded = (joined.take(own) for own in np.split(order, ends)[:-1])
    return replace(schedule, encoded=tuple(encoded))


def _turns(schedule: Schedule, *, costs: Costs | None) -> Ints:
    """Return the rank of each compute action by simulated completion, ties by rank.

    The shards of a unit have the turn of the first. Compute must take time, otherwise an action and
    its consumer could tie; so every time is raised to at least a millionth of the longest action.

    Returns:
        Turns by opcode and slot; those of absent actions are after all others.
    """
    actions = schedule.actions
    costs = costs or abstract_costs(
        schedule.num_stages, num_units=schedule.num_units, weight_s=1.0, backward_s=1.0
    )
    names = ("forward_s", "backward_s", "weight_s")
    longest = max(float(getattr(costs, name).max(initial=0.0)) for name in names)
    least = longest * 1e-6 or 1.0
    costs = replace(costs, **{name: np.maximum(getattr(costs, name), least) for name in names})
    ends = run_clock(schedule, costs=costs).finishes_s[actions.compute]
    order = actions.compute[np.argsort(ends, kind="stable")]
    turns = np.full((NUM_COMPUTE, actions.size), actions.never)
    np.minimum.at(turns, (actions.codes[order], actions.slots[order]), np.arange(order.size))
    return turns
