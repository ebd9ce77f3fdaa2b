"""Placement of the sends and receives of a program, and of its reductions of gradients.

A SEND comes directly after the action that makes the tensor. The place of the RECV decides whether
the program can deadlock. If each RECV is placed directly before its consumer (the obvious
lowering), receives of two neighbours can wait for each other as soon as several messages share a
queue. If each RECV is placed at the moment of its SEND, in one global order of simulated time, all
ranks see all messages in the same order, so even a single queue per rank makes progress:
`checks.check_deadlock_free` proves it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sppo.schedule.actions import NUM_COMPUTE, Op
from sppo.schedule.costs import Costs, abstract_costs
from sppo.schedule.graph import Ints
from sppo.schedule.schedule import Schedule, columns_of
from sppo.schedule.simulation.simulate import simulate


def with_reductions(schedule: Schedule) -> Schedule:
    """Return a schedule of compute with a REDUCE for each stage.

    The REDUCE of a stage follows the last B or W of the stage on its rank. The REDUCE of the stage
    that ends last is at the end of the program, after shards of other ranks' stages: the rank waits
    there for all reductions in flight.
    """
    done = schedule.of(Op.B, Op.W)
    done = done[schedule.stages[done] % schedule.num_ranks == schedule.ranks[done]]
    ends = np.zeros(schedule.num_stages, dtype=np.int64)
    ends[schedule.stages[done]] = done + 1
    stages = np.flatnonzero(ends)
    ranks = stages % schedule.num_ranks
    places = ends[stages]
    latest = np.zeros(schedule.num_ranks, dtype=np.int64)
    np.maximum.at(latest, ranks, places)
    at_end = places == latest[ranks]
    places[at_end] = np.searchsorted(schedule.ranks[:-1], ranks[at_end], side="right")
    return schedule.insert((places, columns_of(ranks, Op.REDUCE, stages)))


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
    turns, ranks, compute = _turns(schedule, costs=costs), schedule.ranks, schedule.compute
    # Actions that are not compute go with the compute action after them.
    stride = schedule.never + 1
    own = np.full(schedule.never, (schedule.num_ranks + 1) * stride)
    own[compute] = turns[schedule.codes[compute], schedule.slots[compute]] + ranks[compute] * stride
    own = np.minimum.accumulate(own[::-1])[::-1] - ranks[:-1] * stride
    parts, when = [schedule.columns], [own]
    for made, send in ((Op.F, Op.SEND_ACT), (Op.B, Op.SEND_GRAD)):
        sends, receives, _, _ = schedule.messages[send]
        parts += [sends, receives]
        when += [turns[made, sends[2]]] * 2
    columns = np.hstack(parts)
    # Of one turn, messages come last.
    ties = columns[3] + schedule.never
    ties[: schedule.never] = np.arange(schedule.never)
    return schedule.with_columns(columns[:, np.lexsort((ties, np.concatenate(when), columns[0]))])


def _turns(schedule: Schedule, *, costs: Costs | None) -> Ints:
    """Return the rank of each compute action by simulated completion, ties by rank.

    The shards of a unit have the turn of the first. Compute must take time, otherwise an action and
    its consumer could tie; so every time is raised to at least a millionth of the longest action.

    Returns:
        Turns by opcode and slot; those of absent actions are after all others.
    """
    costs = costs or abstract_costs(
        schedule.num_stages, num_units=schedule.num_units, weight_s=1.0, backward_s=1.0
    )
    names = ("forward_s", "backward_s", "weight_s")
    longest = max(float(getattr(costs, name).max(initial=0.0)) for name in names)
    least = longest * 1e-6 or 1.0
    costs = replace(costs, **{name: np.maximum(getattr(costs, name), least) for name in names})
    ends = simulate(schedule, costs=costs).finishes_s[schedule.compute]
    order = schedule.compute[np.argsort(ends, kind="stable")]
    turns = np.full((NUM_COMPUTE, schedule.size), schedule.never)
    at = schedule.codes[order], schedule.slots[order]
    np.minimum.at(turns, at, np.arange(order.size))
    return turns
