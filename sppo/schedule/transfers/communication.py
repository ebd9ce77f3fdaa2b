"""Placement of the sends and receives of a program.

A SEND comes directly after the action that makes the tensor. The place of the RECV decides whether
the program can deadlock. If each RECV is placed directly before its consumer (the obvious
lowering), receives of two neighbours can wait for each other as soon as several messages share a
queue. If each RECV is placed at the moment of its SEND, in one global order of simulated time, all
ranks see all messages in the same order, so even a single queue per rank makes progress:
`checks.deadlock.check_deadlock_free` proves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

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
from sppo.schedule.messages import needed_messages
from sppo.schedule.schedule import Schedule
from sppo.schedule.simulation.clock import run_clock

_WIRES = ((F, SEND_ACT, RECV_ACT, 1), (B, SEND_GRAD, RECV_GRAD, -1))
"""Compute that makes a tensor, SEND and RECV of the tensor, and the step to the stage that needs
it."""
_MESSAGES = (SEND_ACT, SEND_GRAD, RECV_ACT, RECV_GRAD)
_Indices = npt.NDArray[np.int64]


def place_messages(schedule: Schedule, *, costs: Costs | None = None) -> Schedule:
    """Return `schedule` with a SEND and a RECV for every tensor that crosses ranks.

    Each RECV is placed at the moment of its SEND, in one global order of simulated time.

    Args:
        schedule: A valid schedule without messages.
        costs: Costs with which the order is simulated, the same on every rank; unit costs if not
            given.

    Raises:
        ValueError: A schedule that has messages already, or whose order has a cycle (a
            :class:`DeadlockError` if ranks wait for each other).
    """
    placed = schedule.first_action(lambda program: np.isin(program.codes, _MESSAGES))
    if placed is not None:
        raise ValueError(f"{placed} is there already: place messages only once")
    turns = _turns(schedule, costs=costs)
    parts: list[list[tuple[_Indices, EncodedProgram]]] = [[] for _ in schedule.encoded]
    for made, send, receive, step in _WIRES:
        slots, numbers, counts, *ends, _, _ = needed_messages(schedule, code=send)
        turn, is_made = turns[made, slots], turns[made, slots] < _never(schedule)
        consumers = slots + step * schedule.num_units
        for code, ranks, names in zip((send, receive), ends, (slots, consumers), strict=True):
            columns = np.full_like(names, code), names, numbers, counts
            messages = EncodedProgram(*(column.astype(np.int32) for column in columns))
            for rank, own in enumerate(parts):
                here = np.flatnonzero((ranks == rank) & is_made)
                own.append((turn[here], messages.take(here)))
    encoded = map(partial(_in_turn, turns=turns), schedule.encoded, parts)
    return replace(schedule, encoded=tuple(encoded))


def _never(schedule: Schedule) -> int:
    """Return a turn after those of all actions."""
    return schedule.num_actions


def _in_turn(
    program: EncodedProgram,
    messages: Sequence[tuple[_Indices, EncodedProgram]],
    *,
    turns: _Indices,
) -> EncodedProgram:
    """Return the program of one rank and its messages, in turn; of one turn, messages come last.

    Actions that are not compute go with the compute action after them.

    Args:
        program: Program of the rank without messages.
        messages: Turns of messages, and the messages.
        turns: Turn of each compute action, by opcode and slot.
    """
    is_compute = program.codes < NUM_COMPUTE
    own = np.full(program.codes.shape, np.iinfo(np.int64).max)
    own[is_compute] = turns[program.codes[is_compute], program.slots[is_compute]]
    own = np.minimum.accumulate(own[::-1])[::-1]
    joined = EncodedProgram.joined([program, *(part for _, part in messages)])
    ties = joined.shards + program.codes.size
    ties[: program.codes.size] = np.arange(program.codes.size)
    return joined.take(np.lexsort((ties, np.concatenate([own, *(turn for turn, _ in messages)]))))


def _turns(schedule: Schedule, *, costs: Costs | None) -> _Indices:
    """Return the rank of each compute action by simulated completion, ties by rank.

    The shards of a unit have the turn of the first. Compute must take time, otherwise an action and
    its consumer could tie; so every time is raised to at least a millionth of the longest action.

    Returns:
        Turns by opcode and slot; those of absent actions are after all others.
    """
    costs = costs or abstract_costs(
        schedule.num_stages, num_units=schedule.num_units, weight_s=1.0, backward_s=1.0
    )
    longest = max(
        float(t.max(initial=0.0)) for t in (costs.forward_s, costs.backward_s, costs.weight_s)
    )
    least = longest * 1e-6 or 1.0
    costs = replace(
        costs,
        forward_s=np.maximum(costs.forward_s, least),
        backward_s=np.maximum(costs.backward_s, least),
        weight_s=np.maximum(costs.weight_s, least),
    )
    actions = schedule.actions
    ends = run_clock(schedule, costs=costs).finishes_s[actions.compute]
    order = actions.compute[np.argsort(ends, kind="stable")]
    turns = np.full((NUM_COMPUTE, schedule.num_stages * schedule.num_units), _never(schedule))
    np.minimum.at(turns, (actions.codes[order], actions.slots[order]), np.arange(order.size))
    return turns
