"""Placement of the sends and receives of a program.

A SEND comes directly after the action that makes the tensor. The place of the RECV decides whether
the program can deadlock. If each RECV is placed directly before its consumer (the obvious
lowering), receives of two neighbours can wait for each other as soon as several messages share a
queue. If each RECV is placed at the moment of its SEND, in one global order of simulated time, all
ranks see all messages in the same order, so even a single queue per rank makes progress:
`checks.deadlock.check_deadlock_free` proves it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from sppo.schedule import encoding
from sppo.schedule.actions import COMPUTE_KINDS, Action, ActionKind, Wire
from sppo.schedule.costs import Costs, abstract_costs
from sppo.schedule.schedule import Schedule
from sppo.schedule.simulation.event_loop import run_clock

_RESULTS: Mapping[ActionKind, tuple[Wire, int]] = {
    ActionKind.F: ("act", 1),
    ActionKind.B: ("grad", -1),
}
"""Results of compute that stages send: the wire, and the step to the stage that takes it."""
_MESSAGES = (encoding.SEND_ACT, encoding.SEND_GRAD, encoding.RECV_ACT, encoding.RECV_GRAD)


class EndsOf(Protocol):
    """Simulation of a schedule with some costs."""

    def __call__(self, *, costs: Costs) -> Sequence[Sequence[float]]:
        """Return when each compute action of each rank ends, in the order of its program."""


class Message(NamedTuple):
    """Message between two ranks, with the actions on both ends."""

    sender: int
    receiver: int
    send: Action
    receive: Action


def _messages_of(action: Action, schedule: Schedule) -> Iterator[Message]:
    """Yield the messages that carry the result of `action`, an F or B, to other ranks."""
    if action.kind not in _RESULTS:
        return
    wire, step = _RESULTS[action.kind]
    routes = schedule.routes(wire, producer=action.stage, unit=action.unit)
    names = (action.sequence, action.subsequence, wire)
    for shard, route in enumerate(routes):
        if route.sender != route.receiver:
            yield Message(
                route.sender,
                route.receiver,
                Action(ActionKind.SEND, action.stage, *names, shard, len(routes)),
                Action(ActionKind.RECV, action.stage + step, *names, shard, len(routes)),
            )


def place_messages(
    schedule: Schedule, *, costs: Costs | None = None, ends_of: EndsOf | None = None
) -> Schedule:
    """Return `schedule` with a SEND and a RECV for every tensor that crosses ranks.

    Each RECV is placed at the moment of its SEND, in one global order of simulated time.

    Args:
        schedule: A valid schedule without messages.
        costs: Costs with which the order is simulated, the same on every rank; unit costs if not
            given.
        ends_of: Function that simulates the schedule faster than its program, with the same
            result; None simulates the program.

    Raises:
        ValueError: A schedule that has messages already, or whose order has a cycle (a
            :class:`DeadlockError` if ranks wait for each other).
    """
    for rank, codes in enumerate(own.codes for own in schedule.encoded):
        for index in np.flatnonzero(np.isin(codes, _MESSAGES)).tolist():
            action = schedule.programs[rank][index]
            raise ValueError(f"{action} is there already: place messages only once")
    placed: list[list[Action]] = [[] for _ in schedule.programs]
    taken = [0] * schedule.num_ranks
    for rank, index in _in_time_order(schedule, costs=costs, ends_of=ends_of):
        if index < taken[rank]:
            continue  # shard already placed with the first shard of its MSP group
        action = schedule.programs[rank][index]
        shards = [rank]
        if action.num_shards > 1:
            shards = [*schedule.msp_groups[schedule.slot(action.stage, action.unit)].ranks]
        for member in shards:
            program = schedule.programs[member]
            end = 1 + (index if member == rank else _next_compute(program, taken[member]))
            placed[member].extend(program[taken[member] : end])
            taken[member] = end
        for sender, receiver, send, receive in _messages_of(action, schedule):
            placed[sender].append(send)
            placed[receiver].append(receive)
    for rank, program in enumerate(schedule.programs):
        placed[rank].extend(program[taken[rank] :])
    return replace(schedule, programs=tuple(map(tuple, placed)))


def _next_compute(program: Sequence[Action], begin: int) -> int:
    """Return the position of the first compute action of `program` from `begin` on."""
    return next(i for i in range(begin, len(program)) if program[i].kind in COMPUTE_KINDS)


def _in_time_order(
    schedule: Schedule, *, costs: Costs | None, ends_of: EndsOf | None
) -> Iterator[tuple[int, int]]:
    """Yield (rank, position) of every compute action by simulated completion, ties by rank.

    Compute must take time, otherwise an action and its consumer could tie; so every time is raised
    to at least a millionth of the longest action.
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
    indices = [np.flatnonzero(program.codes < encoding.NUM_COMPUTE) for program in schedule.encoded]
    if ends_of is None:
        clock = run_clock(schedule, programs=schedule.encoded, costs=costs)
        times = [np.array(own)[at] for own, at in zip(clock.finishes_s, indices, strict=True)]
    else:
        times = [np.array(own) for own in ends_of(costs=costs)]
        assert [*map(len, times)] == [*map(len, indices)], "ends of another program"
    ranks = [np.full(at.shape, rank) for rank, at in enumerate(indices)]
    all_ranks, all_indices = np.concatenate(ranks), np.concatenate(indices)
    order = np.lexsort((all_indices, all_ranks, np.concatenate(times)))
    yield from zip(all_ranks[order].tolist(), all_indices[order].tolist(), strict=True)
