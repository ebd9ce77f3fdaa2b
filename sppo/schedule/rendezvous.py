"""Proof that a lowered program cannot deadlock: play it where messages need both ends.

The model is stricter than any transport. A host walks its program; SEND and RECV go to the end of
a queue and the host walks on; it stops only at a compute action whose message has not come. A
message moves when it is at the head of its sender's queue and of its receiver's queue. What ends
share a queue is the parameter: with a queue per rank everything waits for everything, with a queue
per directed edge only messages of the same wire between the same two ranks do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

from sppo.schedule.actions import Action, ActionKind, Schedule
from sppo.schedule.communication import Message, message_map
from sppo.schedule.encoding import encode
from sppo.schedule.event_loop import DeadlockError

Queues = Literal["rank", "pair", "direction", "pair_direction", "edge"]
_Key = tuple[object, ...]
_KEYS: dict[str, Callable[[int, int, str, str], _Key]] = {
    "rank": lambda rank, peer, end, wire: (rank,),
    "pair": lambda rank, peer, end, wire: (rank, peer),
    "direction": lambda rank, peer, end, wire: (rank, end),
    "pair_direction": lambda rank, peer, end, wire: (rank, peer, end),
    "edge": lambda rank, peer, end, wire: (rank, peer, end, wire),
}
_MESSAGES = (ActionKind.SEND, ActionKind.RECV)
_INPUT_OF = {"act": ActionKind.F, "grad": ActionKind.B}


def replay(schedule: Schedule, *, queues: Queues = "rank") -> None:
    """Check that `schedule`, with its messages placed, runs to its end.

    Args:
        schedule: A schedule with SEND and RECV actions.
        queues: What shares a queue at each end: all messages of a rank; of a pair of ranks; of a
            direction (all sends, all receives); of a pair and direction; of a directed edge, which
            is (sender, receiver, wire).

    Raises:
        DeadlockError: it does not; names where the first ranks stand.
    """
    _Replay(schedule, queues=queues).run()


class _Replay:
    """Hosts, queues and which messages have moved."""

    def __init__(self, schedule: Schedule, *, queues: Queues) -> None:
        self.schedule = schedule
        self.key = _KEYS[queues]
        self.queues = queues
        self.ends: dict[tuple[int, Action], Message] = {}
        self.expected: dict[tuple[int, ActionKind, int, tuple[int, int]], int] = {}
        self._find_messages()
        self.line: dict[_Key, deque[Message]] = {}
        self.position = [0] * schedule.num_ranks
        self.woken: list[int] = []
        self.gang: dict[tuple[ActionKind, int, tuple[int, int]], set[int]] = {}

    def _find_messages(self) -> None:
        messages = message_map(self.schedule, programs=encode(self.schedule))
        for program in self.schedule.programs:
            for action in program:
                if action.kind in _MESSAGES or action.piece > 0:
                    continue
                for message in messages.sent_by(action):
                    self.ends[message.sender, message.send] = message
                    self.ends[message.receiver, message.receive] = message
                    needed = self._needed_by(message)
                    self.expected[needed] = self.expected.get(needed, 0) + 1

    @staticmethod
    def _needed_by(message: Message) -> tuple[int, ActionKind, int, tuple[int, int]]:
        receive = message.receive
        assert receive.wire is not None, f"{receive} carries nothing"
        return message.receiver, _INPUT_OF[receive.wire], receive.stage, receive.unit

    def run(self) -> None:
        """Walk all hosts as far as they get."""
        self.woken = list(range(self.schedule.num_ranks))
        while self.woken:
            rank = self.woken.pop()
            program = self.schedule.programs[rank]
            while self.position[rank] < len(program):
                if not self._step(rank, program[self.position[rank]]):
                    break
                self.position[rank] += 1
        stuck = [
            (rank, index)
            for rank, index in enumerate(self.position)
            if index < len(self.schedule.programs[rank])
        ]
        if stuck:
            shown = "; ".join(
                f"rank {rank} at action {index + 1}, {self.schedule.programs[rank][index]}"
                for rank, index in stuck[:4]
            )
            raise DeadlockError(
                f"messages wait for each other with one queue per {self.queues}: {shown}",
                rank=stuck[0][0],
                index=stuck[0][1],
            )

    def _step(self, rank: int, action: Action) -> bool:
        """Do one action of a host; whether it walks on."""
        if action.kind in _MESSAGES:
            self._enqueue(rank, action)
            return True
        if action.kind not in (ActionKind.F, ActionKind.B):
            return True
        if self.expected.get((rank, action.kind, action.stage, action.unit), 0):
            return False
        return action.num_pieces == 1 or self._join(rank, action)

    def _join(self, rank: int, action: Action) -> bool:
        """A piece goes on when all pieces of its unit have come."""
        members = self.gang.setdefault((action.kind, action.stage, action.unit), set())
        if rank not in members:
            members.add(rank)
            if len(members) == action.num_pieces:
                self.woken.extend(sorted(members - {rank}, reverse=True))
        return len(members) == action.num_pieces

    def _enqueue(self, rank: int, action: Action) -> None:
        message = self.ends.get((rank, action))
        if message is None:
            raise DeadlockError(
                f"rank {rank}, {action}: nobody is at the other end",
                rank=rank,
                index=self.position[rank],
            )
        key = self._queue(message, sending=action.kind is ActionKind.SEND)
        line = self.line.setdefault(key, deque())
        line.append(message)
        if len(line) == 1:
            self._move(message)

    def _queue(self, message: Message, *, sending: bool) -> _Key:
        wire = message.send.wire or ""
        if sending:
            return self.key(message.sender, message.receiver, "send", wire)
        return self.key(message.receiver, message.sender, "recv", wire)

    def _move(self, message: Message) -> None:
        """Move `message` if it heads both of its queues, and then whatever comes to the head."""
        candidates = [message]
        while candidates:
            head = candidates.pop()
            out = self.line.get(self._queue(head, sending=True))
            into = self.line.get(self._queue(head, sending=False))
            if not out or not into or out[0] is not head or into[0] is not head:
                continue
            out.popleft()
            into.popleft()
            candidates.extend(line[0] for line in (out, into) if line)
            needed = self._needed_by(head)
            self.expected[needed] -= 1
            if not self.expected[needed]:
                self.woken.append(head.receiver)
