"""Proof that a lowered program cannot deadlock: play it where messages need both ends.

The model is stricter than any transport. A host walks its program; SEND and RECV go to the end of
its rank's only queue and the host walks on; it stops only at a compute action whose message has not
come. A message moves when it is at the head of both queues: its sender's and its receiver's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from sppo.schedule.actions import Schedule
from sppo.schedule.encoding import (
    RECV_ACT,
    RECV_GRAD,
    SEND_ACT,
    SEND_GRAD,
    B,
    F,
    encode,
)
from sppo.schedule.event_loop import DeadlockError
from sppo.schedule.msp_groups import find_msp_groups, msp_routes

_ACT, _GRAD = 0, 1
_WIRES = {SEND_ACT: _ACT, SEND_GRAD: _GRAD, RECV_ACT: _ACT, RECV_GRAD: _GRAD}


def check_deadlock_free(schedule: Schedule) -> None:
    """Check that `schedule`, with its messages placed, runs to its end.

    Raises:
        DeadlockError: it does not; names where the first ranks stand.
    """
    _Replay(schedule).run()


class _Replay:
    """Hosts, queues and which messages have moved.

    A message is a number: its wire and producing slot, or one behind all of these for each
    interval of a unit that is cut into shards.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.ranks = schedule.num_ranks
        self.units = schedule.num_units
        self.size = schedule.num_stages * self.units
        self.rank_of = [schedule.placement.rank_of(s) for s in range(schedule.num_stages)]
        programs = encode(schedule)
        self.codes = [program.codes.tolist() for program in programs]
        self.slots = [program.slots.tolist() for program in programs]
        self.shards: list[list[int]] = [program.shards.tolist() for program in programs]
        self.widths = [program.num_shards.tolist() for program in programs]
        self.cut = msp_routes(schedule, groups=find_msp_groups(schedule, programs=programs))
        self._number_cut_messages()
        # Messages that a compute action still waits for, by (wire, consuming slot, rank).
        self.expected = self._count_expected()
        self.lines: list[deque[int]] = [deque() for _ in range(self.ranks)]
        self.position = [0] * self.ranks
        self.woken: list[int] = []
        self.group: dict[tuple[int, int], set[int]] = {}

    def _number_cut_messages(self) -> None:
        self.first_number: dict[tuple[int, int], int] = {}
        self.ends: list[tuple[int, int, int, int]] = []
        for (code, slot), routes in self.cut.items():
            self.first_number[_WIRES[code], slot] = 2 * self.size + len(self.ends)
            self.ends += [(_WIRES[code], slot, route.sender, route.receiver) for route in routes]

    def _count_expected(self) -> dict[int, int]:
        expected: dict[int, int] = {}
        sent = {SEND_ACT, SEND_GRAD}
        for rank, codes in enumerate(self.codes):
            for index, code in enumerate(codes):
                if code in sent:
                    message = self._message(rank, index, _WIRES[code], self.slots[rank][index])
                    needed = self._needed_by(message)
                    expected[needed] = expected.get(needed, 0) + 1
        return expected

    def _message(self, rank: int, index: int, wire: int, slot: int) -> int:
        """Number of the message that an action of `rank` sends or receives."""
        first = self.first_number.get((wire, slot))
        if first is not None:
            return first + self.shards[rank][index]
        stage = slot // self.units + (1 if wire == _ACT else -1)
        if not 0 <= slot < self.size or not 0 <= stage < len(self.rank_of):
            raise DeadlockError(
                f"rank {rank}, {self.schedule.programs[rank][index]}: nobody is at the other end",
                rank=rank,
                index=index,
            )
        return wire * self.size + slot

    def _route(self, message: int) -> tuple[int, int, int, int]:
        """Wire, producing slot, sender and receiver of a message."""
        if message >= 2 * self.size:
            return self.ends[message - 2 * self.size]
        wire, slot = divmod(message, self.size)
        stage = slot // self.units
        return wire, slot, self.rank_of[stage], self.rank_of[stage + (1 if wire == _ACT else -1)]

    def _needed_by(self, message: int) -> int:
        wire, slot, _, receiver = self._route(message)
        return (wire * self.size + self._consumer(wire, slot)) * self.ranks + receiver

    def _consumer(self, wire: int, slot: int) -> int:
        return slot + (self.units if wire == _ACT else -self.units)

    def run(self) -> None:
        """Walk all hosts as far as they get."""
        self.woken = list(range(self.ranks))
        while self.woken:
            rank = self.woken.pop()
            codes, slots, position = self.codes[rank], self.slots[rank], self.position
            while position[rank] < len(codes):
                index = position[rank]
                if not self._step(rank, index, codes[index], slots[index]):
                    break
                position[rank] += 1
        stuck = list(self._stuck())
        if stuck:
            shown = "; ".join(
                f"rank {rank} at action {index + 1}, {self.schedule.programs[rank][index]}"
                for rank, index in stuck[:4]
            )
            raise DeadlockError(
                f"messages wait for each other with one queue per rank: {shown}",
                rank=stuck[0][0],
                index=stuck[0][1],
            )

    def _stuck(self) -> Iterator[tuple[int, int]]:
        for rank, index in enumerate(self.position):
            if index < len(self.codes[rank]):
                yield rank, index

    def _step(self, rank: int, index: int, code: int, slot: int) -> bool:
        """Do one action of a host; whether it walks on."""
        if code in (SEND_ACT, SEND_GRAD):
            self._enqueue(rank, self._message(rank, index, _WIRES[code], slot))
        elif code in (RECV_ACT, RECV_GRAD):
            wire = _WIRES[code]
            produced = slot - self.units if wire == _ACT else slot + self.units
            self._enqueue(rank, self._message(rank, index, wire, produced))
        elif code in (F, B):
            wire = _ACT if code == F else _GRAD
            if self.expected.get((wire * self.size + slot) * self.ranks + rank, 0):
                return False
            width = self.widths[rank][index]
            return width == 1 or self._join(rank, code, slot, width)
        return True

    def _join(self, rank: int, code: int, slot: int, width: int) -> bool:
        """A shard goes on when all shards of its unit have come."""
        members = self.group.setdefault((code, slot), set())
        if rank not in members:
            members.add(rank)
            if len(members) == width:
                self.woken.extend(sorted(members - {rank}, reverse=True))
        return len(members) == width

    def _enqueue(self, rank: int, message: int) -> None:
        line = self.lines[rank]
        line.append(message)
        if len(line) == 1:
            self._move(message)

    def _move(self, message: int) -> None:
        """Move `message` if it heads both of its queues, and then whatever comes to the head."""
        candidates = [message]
        while candidates:
            head = candidates.pop()
            _, _, sender, receiver = self._route(head)
            out, into = self.lines[sender], self.lines[receiver]
            if not out or not into or out[0] != head or into[0] != head:
                continue
            out.popleft()
            into.popleft()
            candidates.extend(line[0] for line in (out, into) if line)
            needed = self._needed_by(head)
            self.expected[needed] -= 1
            if not self.expected[needed]:
                self.woken.append(receiver)
