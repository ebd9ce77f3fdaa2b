"""Proof that a lowered program cannot deadlock: its dependency graph has no cycle.

The model is stricter than any transport. A host walks its program; SEND and RECV are appended to
the only queue of the rank and the host walks on; the host stops at a compute action until that
queue is empty. A message moves when it is at the head of both its sender's queue and its receiver's
queue. So

* a compute action waits for the previous compute on its rank, for its messages, and for the last
  message before it in the queue of its rank; the shards of a unit, which run together, wait for the
  dependencies of all shards;
* a message waits for the compute before its SEND and before its RECV, and for the previous message
  in either queue.

All actions happen if, and only if, this graph has no cycle. Compute waits for messages of other
actions, too, because the first launch of a kernel on a GPU may load its code, which waits until all
that was issued before has ended, messages included; so does an allocation that finds no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

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
from sppo.schedule.schedule import Schedule
from sppo.schedule.simulation.event_loop import DeadlockError

_Nodes = npt.NDArray[np.int64]
_ACTIVATIONS = (SEND_ACT, RECV_ACT)
_SENDS = (SEND_ACT, SEND_GRAD)
_SHOWN = 4


def check_deadlock_free(
    schedule: Schedule, *, programs: Sequence[EncodedProgram] | None = None
) -> None:
    """Raise DeadlockError unless `schedule`, with its messages placed, runs to its end.

    Args:
        schedule: Schedule in which every message has both ends
            (:mod:`sppo.schedule.checks.validate`).
        programs: Encoded programs of `schedule`; `schedule.encoded` if not given.

    Raises:
        DeadlockError: Messages that wait for each other; the message names where the first ranks
            wait.
    """
    graph = _WaitingGraph(schedule, programs=programs or schedule.encoded)
    standing = list(graph.standing())
    if standing:
        shown = "; ".join(
            f"rank {rank} at action {index + 1}, {schedule.programs[rank][index]}"
            for rank, index in standing[:_SHOWN]
        )
        raise DeadlockError(
            f"messages wait for each other with one queue per rank: {shown}",
            rank=standing[0][0],
            index=standing[0][1],
        )


class _WaitingGraph:
    """Dependency graph of the compute actions and messages of a program.

    A node is a unit's compute of one kind on one stage, or a message, identified by the stage and
    unit that make it. If a unit is cut into shards, each of its messages is a node.
    """

    def __init__(self, schedule: Schedule, *, programs: Sequence[EncodedProgram]) -> None:
        self._schedule, self._programs = schedule, programs
        self._size = schedule.num_stages * schedule.num_units
        self._cut: dict[int, int] = {}
        self._count = (NUM_COMPUTE + 2) * self._size
        for (code, slot), parts in schedule.msp_routes.items():
            self._cut[self._whole_message(code, slot)] = self._count
            self._count += len(parts)
        self._compute = [self._compute_nodes(rank) for rank in range(len(programs))]
        waits = [self._waits_of(rank) for rank in range(len(programs))]
        self._later, self._earlier = (np.concatenate(ends) for ends in zip(*waits, strict=True))

    def standing(self) -> Iterator[tuple[int, int]]:
        """Yield the ranks that do not reach their end, and the positions where they wait."""
        never = self._never_happens()
        for rank, nodes in enumerate(self._compute):
            waits = np.flatnonzero((nodes >= 0) & never[nodes])
            if waits.size:
                yield rank, int(waits[0])

    def _never_happens(self) -> npt.NDArray[np.bool_]:
        """Return whether each node is on a cycle or depends on one."""
        from scipy.sparse import csgraph, csr_array

        def graph(earlier: _Nodes, later: _Nodes) -> csr_array:
            shape = (self._count + 1, self._count + 1)
            return csr_array((np.ones(len(later), dtype=np.int8), (earlier, later)), shape=shape)

        _, circle_of = csgraph.connected_components(
            graph(self._earlier, self._later), connection="strong"
        )
        in_circle = np.flatnonzero(np.bincount(circle_of)[circle_of] > 1)
        never = np.zeros(self._count + 1, dtype=bool)
        if in_circle.size:
            source = np.full(in_circle.size, self._count)
            reached = graph(
                np.concatenate([self._earlier, source]), np.concatenate([self._later, in_circle])
            )
            behind = csgraph.breadth_first_order(reached, self._count, return_predecessors=False)
            never[behind] = True
        return never[: self._count]

    def _whole_message(self, code: int, slot: int) -> int:
        """Return the node of a message of a whole unit."""
        return (NUM_COMPUTE + (code not in _ACTIVATIONS)) * self._size + slot

    def _compute_nodes(self, rank: int) -> _Nodes:
        """Return the node of each compute action of a program; -1 for other actions."""
        program = self._programs[rank]
        codes, slots = program.codes.astype(np.int64), program.slots.astype(np.int64)
        nodes: _Nodes = np.where(codes < NUM_COMPUTE, codes * self._size + slots, -1)
        return nodes

    def _waits_of(self, rank: int) -> tuple[_Nodes, _Nodes]:
        """Return the edges of the graph on one rank: waiting nodes, and the nodes they wait for."""
        compute = self._compute[rank]
        messages, consumers, is_sent = self._messages(rank)
        places = np.where(compute >= 0, np.arange(compute.size), -1)
        before = np.concatenate([[-1], np.maximum.accumulate(places)[:-1]])
        acts = np.flatnonzero((compute >= 0) | (messages >= 0))
        acts = acts[before[acts] >= 0]
        queue = messages[messages >= 0]
        last = np.maximum.accumulate(np.where(messages >= 0, np.arange(compute.size), -1))
        after = np.flatnonzero((compute >= 0) & (last > before))
        later = [np.maximum(compute, messages)[acts], queue[1:], consumers[is_sent], compute[after]]
        earlier = [compute[before[acts]], queue[:-1], messages[is_sent], messages[last[after]]]
        return np.concatenate(later), np.concatenate(earlier)

    def _messages(self, rank: int) -> tuple[_Nodes, _Nodes, npt.NDArray[np.bool_]]:
        """Return each action's message (-1 if none), the waiting consumer, and if it is a SEND.

        Raises:
            DeadlockError: A message of a stage that has no neighbour on that side.
        """
        program, units, size = self._programs[rank], self._schedule.num_units, self._size
        codes, slots = program.codes, program.slots.astype(np.int64)
        carries, is_sent = np.isin(codes, (*_SENDS, RECV_ACT, RECV_GRAD)), np.isin(codes, _SENDS)
        is_activation = np.isin(codes, _ACTIVATIONS)
        step = np.where(is_activation, units, -units)
        made = slots - step * ~is_sent
        lone = (np.minimum(made, made + step) < 0) | (np.maximum(made, made + step) >= size)
        for index in np.flatnonzero(carries & lone).tolist():
            raise DeadlockError(
                f"rank {rank}, {self._schedule.programs[rank][index]}: nobody is at the other end",
                rank=rank,
                index=index,
            )
        nodes = np.where(carries, (NUM_COMPUTE + ~is_activation) * size + made, -1)
        if self._cut:
            firsts = [self._cut.get(node, -1) for node in nodes.tolist()]
            first = np.array(firsts, dtype=np.int64)
            nodes = np.where(first >= 0, first + program.shards, nodes)
        consumers = np.where(is_activation, F, B) * size + made + step
        return nodes, consumers, is_sent
