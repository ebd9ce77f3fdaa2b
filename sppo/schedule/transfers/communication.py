"""Placing the sends and receives of a program.

A SEND stands right behind the action that makes the tensor. The place of the RECV decides whether
the program can deadlock. Placed in front of its consumer (the obvious lowering), receives of two
neighbours can wait for each other as soon as several messages share a queue. Placed *from the
sender's side*, in one global order of simulated time, all ranks see all messages in the same
order, so even a single queue per rank moves on: `checks.deadlock.check_deadlock_free` proves it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sppo.schedule import encoding
from sppo.schedule.actions import COMPUTE_KINDS, Action, ActionKind, Schedule, Wire
from sppo.schedule.costs import Costs, abstract_costs
from sppo.schedule.encoding import EncodedProgram, encode
from sppo.schedule.event_loop import run_clock
from sppo.schedule.msp_groups import MspGroup, Route, find_msp_groups, msp_routes

_MESSAGES = (ActionKind.SEND, ActionKind.RECV)


@dataclass(frozen=True, slots=True)
class Message:
    """One message: who sends it to whom, and the actions on both ends."""

    sender: int
    receiver: int
    send: Action
    receive: Action


@dataclass(frozen=True, slots=True, eq=False)
class MessageMap:
    """All messages a schedule needs, looked up by the action that makes the tensor.

    `groups` and `routes` are empty unless units are cut into shards.
    """

    schedule: Schedule
    groups: Mapping[int, MspGroup]
    routes: Mapping[tuple[int, int], tuple[Route, ...]]

    def sent_by(self, action: Action) -> list[Message]:
        """Messages that carry the result of `action`, an F or B, to other ranks."""
        schedule, stage = self.schedule, action.stage
        wire: Wire = "act" if action.kind is ActionKind.F else "grad"
        neighbour = stage + 1 if wire == "act" else stage - 1
        if not 0 <= neighbour < schedule.num_stages or action.kind not in (
            ActionKind.F,
            ActionKind.B,
        ):
            return []
        code = encoding.SEND_ACT if wire == "act" else encoding.SEND_GRAD
        routes: tuple[Route, ...] = ()
        if self.routes:
            sequence, subsequence = action.unit
            unit = schedule.unit_offsets()[sequence] + subsequence
            routes = self.routes.get((code, stage * schedule.num_units + unit), ())
        if not routes:
            rank_of = schedule.placement.rank_of
            sequence, subsequence = action.unit
            tokens = schedule.lengths[sequence][subsequence]
            routes = (Route(rank_of(stage), rank_of(neighbour), 0, tokens, tokens),)
        names = (action.sequence, action.subsequence, wire)
        return [
            Message(
                route.sender,
                route.receiver,
                Action(ActionKind.SEND, stage, *names, shard, len(routes)),
                Action(ActionKind.RECV, neighbour, *names, shard, len(routes)),
            )
            for shard, route in enumerate(routes)
            if route.sender != route.receiver
        ]


def message_map(schedule: Schedule, *, programs: Sequence[EncodedProgram]) -> MessageMap:
    """The messages `schedule` needs."""
    groups = find_msp_groups(schedule, programs=programs)
    return MessageMap(schedule, groups, msp_routes(schedule, groups=groups))


def place_messages(schedule: Schedule, *, costs: Costs | None = None) -> Schedule:
    """Return `schedule` with a SEND and a RECV for every tensor that crosses ranks.

    Each RECV stands at the moment of its SEND, in one global order of simulated time.

    Args:
        schedule: A valid schedule without messages.
        costs: What that order is simulated with; every rank must use the same. Unit costs if not
            given.

    Raises:
        ValueError: the schedule has messages already, or its order contradicts itself.
    """
    for program in schedule.programs:
        for action in program:
            if action.kind in _MESSAGES:
                raise ValueError(f"{action} is there already: place messages only once")
    programs = encode(schedule)
    messages = message_map(schedule, programs=programs)
    placed: list[list[Action]] = [[] for _ in programs]
    taken = [0] * schedule.num_ranks
    for rank, index in _in_time_order(schedule, programs=programs, costs=costs):
        if index < taken[rank]:
            continue  # a shard that its MSP group's first shard has placed
        action = schedule.programs[rank][index]
        members: tuple[int, ...] = (rank,)
        if action.num_shards > 1:
            sequence, subsequence = action.unit
            unit = schedule.unit_offsets()[sequence] + subsequence
            members = messages.groups[action.stage * schedule.num_units + unit].ranks
        for member in members:
            taken[member] = _take_through_compute(
                schedule.programs[member], begin=taken[member], placed=placed[member]
            )
        for message in messages.sent_by(action):
            placed[message.sender].append(message.send)
            placed[message.receiver].append(message.receive)
    for rank, program in enumerate(schedule.programs):
        placed[rank].extend(program[taken[rank] :])
    return replace(schedule, programs=tuple(map(tuple, placed)))


def _take_through_compute(program: Sequence[Action], *, begin: int, placed: list[Action]) -> int:
    """Append `program` from `begin` through its next compute action; where to go on."""
    index = begin
    while program[index].kind not in COMPUTE_KINDS:
        placed.append(program[index])
        index += 1
    placed.append(program[index])
    return index + 1


def _in_time_order(
    schedule: Schedule, *, programs: Sequence[EncodedProgram], costs: Costs | None
) -> Iterator[tuple[int, int]]:
    """(rank, position) of every compute action by simulated completion, ties by rank.

    Compute must take time, or an action and the one that needs it could tie; so everything is
    raised to a millionth of the longest action.
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
    clock = run_clock(schedule, programs=programs, costs=costs)
    times, ranks, indices = [], [], []
    for rank, program in enumerate(programs):
        which = np.flatnonzero(program.codes < encoding.NUM_COMPUTE)
        times.append(np.array(clock.finishes_s[rank])[which])
        ranks.append(np.full(which.shape, rank))
        indices.append(which)
    all_ranks, all_indices = np.concatenate(ranks), np.concatenate(indices)
    order = np.lexsort((all_indices, all_ranks, np.concatenate(times)))
    yield from zip(all_ranks[order].tolist(), all_indices[order].tolist(), strict=True)
