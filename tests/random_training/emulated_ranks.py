"""Ranks as threads of one process, and messages between them in memory.

Implements the functions of torch.distributed that sppo calls, with the loosest order they promise:
data of a message or a collective moves at a moment that a seed chooses, between the last rank's
call and the first wait, and received memory is NaN until the receiver has waited. Memory that is
changed during a transfer, or read before it has arrived, therefore shows in the results, and does
so again with the same seed.

On request, operations run in the order of NCCL instead, each after the one before it in its stream
has ended: a send with the matching receive, a collective once all its ranks have reached it. Ranks
that wait for each other then are a :class:`tests.random_training.turns.Deadlock`.
"""

from __future__ import annotations

import pickle
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed
from torch import Tensor

from sppo.engine.step_programs import StepPrograms
from sppo.parallel import collectives
from sppo.schedule.schedule import Schedule
from tests.random_training.turns import Turns

Order = Literal["any", "communicator", "rank"]
"""Which operations of a rank run in the order in which they are issued: none, as over gloo; those
of one communicator, as over NCCL; those of all its communicators, as if they shared one stream. The
last is the worst order that ``NCCL_LAUNCH_ORDER_IMPLICIT`` can cause."""


def run_emulated(
    function: Callable[..., Any], *arguments: Any, ranks: int, seed: int, order: Order = "any"
) -> list[Any]:
    """What ``function(rank, *arguments)`` returns on each of ``ranks`` emulated ranks."""
    if ranks == 1:
        return [function(0, *arguments)]
    turns = Turns(ranks, seed=seed)
    with _in_place_of_torch(Distributed(turns, order=order)), _same_for_all_ranks():
        return turns.run(lambda rank: function(rank, *arguments))


@contextmanager
def _same_for_all_ranks() -> Iterator[None]:
    """Make the program of a step once for all ranks, which takes longer than to run it here."""
    make = StepPrograms._equal_units
    made: dict[Any, Schedule] = {}

    def program(self: StepPrograms, lengths: Any, placements: Any) -> Schedule:
        pipeline, trains = self._pipeline, bool(placements)
        key = (pipeline.schedule, pipeline.num_ranks, pipeline.num_virtual, lengths, trains)
        if key not in made:
            made[key] = make(self, lengths, placements)
        return made[key]

    with patch.object(StepPrograms, "_equal_units", program):
        yield


@contextmanager
def _in_place_of_torch(emulated: Distributed) -> Iterator[None]:
    """Let every module of sppo talk through ``emulated``."""
    replacements = (
        ("dist", torch.distributed, emulated),
        ("all_gather", collectives.all_gather, emulated.all_gather),
        ("reduce_scatter", collectives.reduce_scatter, emulated.reduce_scatter),
    )
    undo = []
    for module_name, module in sorted(sys.modules.items()):
        if not module_name.startswith("sppo."):
            continue
        for name, original, replacement in replacements:
            if vars(module).get(name) is original:
                change = patch.object(module, name, replacement)
                change.start()
                undo.append(change)
    try:
        yield
    finally:
        for change in reversed(undo):
            change.stop()


class Group:
    """A communicator as one of its ranks sees it."""

    def __init__(
        self, ranks: tuple[int, ...], *, number: int, here: int, is_for_hosts: bool
    ) -> None:
        self.ranks, self.key, self._here = ranks, (ranks, number), here
        self.is_for_hosts = is_for_hosts
        self.calls = 0

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(self._here)


@dataclass(eq=False)
class _Message:
    """One tensor from a sender to a receiver; either may come first."""

    late: bool
    sent: Tensor | None = None
    received: Tensor | None = None
    moved: bool = False
    num_ranks: int = 2

    def is_posted(self) -> bool:
        return self.sent is not None and self.received is not None

    def move(self) -> None:
        if self.moved:
            return
        assert self.sent is not None
        assert self.received is not None
        _same_kind(self.sent, self.received)
        self.received.view(-1).copy_(self.sent.view(-1))
        self.moved = True


@dataclass(eq=False)
class _Call:
    """One collective: what every rank gave, and what every rank gets."""

    late: bool
    num_ranks: int
    name: str = ""
    given: dict[int, Any] = field(default_factory=dict)
    results: list[Any] | None = None

    def is_posted(self) -> bool:
        return len(self.given) == self.num_ranks


class _Streams:
    """Operations that have not run, in the order in which each rank issued them.

    Args:
        order: which operations of a rank have an order.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._left: defaultdict[Any, deque[_Message | _Call]] = defaultdict(deque)

    def put(self, operation: _Message | _Call, *, rank: int, group: Group) -> None:
        if self._order == "rank" and not group.is_for_hosts:
            self._left[rank].append(operation)
        elif self._order == "communicator":
            self._left[rank, group.key].append(operation)

    def has_run(self, operation: _Message | _Call) -> bool:
        self._run()
        return operation.is_posted() and not any(operation in left for left in self._left.values())

    def has_run_all(self, rank: int) -> bool:
        """Whether nothing is left in the stream of a rank whose communicators share one."""
        self._run()
        return not self._left[rank]

    def _run(self) -> None:
        """Run what is the first of each of its ranks, until there is no more."""
        while True:
            firsts = Counter(left[0] for left in self._left.values() if left)
            ready = {
                operation
                for operation, streams in firsts.items()
                if operation.is_posted() and streams == operation.num_ranks
            }
            if not ready:
                return
            for left in self._left.values():
                if left and left[0] in ready:
                    left.popleft()


@dataclass(eq=False)
class _Work:
    """What a caller waits on."""

    complete: Callable[[], None]
    is_done: Callable[[], bool]

    def wait(self) -> bool:
        self.complete()
        return True

    def is_completed(self) -> bool:
        return self.is_done()


class Distributed:
    """``torch.distributed`` for threads that take turns."""

    ReduceOp = torch.distributed.ReduceOp
    ProcessGroup = Group

    def __init__(self, turns: Turns, *, order: Order = "any") -> None:
        self._turns, self._streams = turns, _Streams(order)
        self._groups_made: Counter[tuple[int, tuple[int, ...]]] = Counter()
        self._messages: dict[Any, list[_Message]] = {}
        self._posted: Counter[Any] = Counter()
        self._calls: dict[Any, _Call] = {}

    def new_group(self, ranks: Sequence[int], *, backend: str | None = None, **_: Any) -> Group:
        here, members = self._turns.here, tuple(ranks)
        self._groups_made[here, members] += 1
        number = self._groups_made[here, members]
        return Group(members, number=number, here=here, is_for_hosts=backend == "gloo")

    def wait_for_issued(self) -> None:
        """Block this rank until all that it issued has run, as a kernel does whose code is loaded.

        Data arrives only where somebody waits for it.
        """
        here = self._turns.here
        self._turns.wait(lambda: self._streams.has_run_all(here), "what it issued before")

    # Messages

    def isend(self, tensor: Tensor, dst: int, *, group: Group) -> _Work:
        message = self._message(group, self._turns.here, dst, end="sent", tensor=tensor)
        return self._message_work(message, f"rank {dst} to receive")

    def irecv(self, tensor: Tensor, src: int, *, group: Group) -> _Work:
        _poison(tensor)
        message = self._message(group, src, self._turns.here, end="received", tensor=tensor)
        return self._message_work(message, f"rank {src} to send")

    def send(self, tensor: Tensor, dst: int, *, group: Group) -> None:
        self.isend(tensor, dst, group=group).wait()

    def recv(self, tensor: Tensor, src: int, *, group: Group) -> None:
        self.irecv(tensor, src, group=group).wait()

    def _message(
        self, group: Group, sender: int, receiver: int, *, end: str, tensor: Tensor
    ) -> _Message:
        assert tensor.is_contiguous(), "gloo sends contiguous tensors only"
        assert sender != receiver, "a message goes to another rank"
        key = (group.key, sender, receiver)
        queue, place = self._messages.setdefault(key, []), self._posted[key, end]
        self._posted[key, end] += 1
        if place == len(queue):
            queue.append(_Message(late=self._turns.random.random() < 0.7))
        message = queue[place]
        setattr(message, end, tensor)
        self._streams.put(message, rank=self._turns.here, group=group)
        if self._streams.has_run(message) and not message.late:
            message.move()
        return message

    def _message_work(self, message: _Message, what: str) -> _Work:
        def complete() -> None:
            self._turns.wait(lambda: self._streams.has_run(message), what)
            message.move()

        return _Work(complete, lambda: message.moved)

    # Collectives

    def broadcast(
        self, tensor: Tensor, src: int, *, group: Group, async_op: bool = False
    ) -> _Work | None:
        place = group.ranks.index(src)
        if group.rank() != place:
            _poison(tensor)
        return self._collective(
            "broadcast",
            group,
            tensor,
            lambda given: [given[place].clone()] * group.size(),
            tensor.copy_,
            async_op,
        )

    def reduce(
        self, tensor: Tensor, dst: int, *, group: Group, async_op: bool = False
    ) -> _Work | None:
        place = group.ranks.index(dst)

        def combine(given: list[Tensor]) -> list[Tensor]:
            nothing = torch.full_like(given[0], float("nan"))
            return [_sum(given) if n == place else nothing for n in range(group.size())]

        return self._collective("reduce", group, tensor, combine, tensor.copy_, async_op)

    def all_reduce(
        self, tensor: Tensor, *, group: Group, op: Any = None, async_op: bool = False
    ) -> _Work | None:
        largest = op == self.ReduceOp.MAX

        def combine(given: list[Tensor]) -> list[Tensor]:
            total = torch.stack(given).amax(0) if largest else _sum(given)
            return [total] * group.size()

        name = "all_reduce of largest" if largest else "all_reduce"
        return self._collective(name, group, tensor, combine, tensor.copy_, async_op)

    def all_gather(
        self, output: Tensor, tensor: Tensor, *, group: Group, async_op: bool = False
    ) -> _Work | None:
        assert output.numel() == tensor.numel() * group.size(), "one part of each rank"
        given = tensor.clone()
        _poison(output)
        if _share_memory(output, tensor):
            tensor.copy_(given)
        return self._collective(
            "all_gather",
            group,
            tensor,
            lambda parts: [torch.cat([part.reshape(-1) for part in parts])] * group.size(),
            lambda whole: output.view(-1).copy_(whole),
            async_op,
        )

    def reduce_scatter(
        self, output: Tensor, tensor: Tensor, *, group: Group, async_op: bool = False
    ) -> _Work | None:
        assert tensor.numel() == output.numel() * group.size(), "one part for each rank"
        if not _share_memory(output, tensor):  # in place it has this rank's own until then
            _poison(output)
        return self._collective(
            "reduce_scatter",
            group,
            tensor,
            lambda given: list(_sum(given).view(-1).chunk(group.size())),
            lambda part: output.view(-1).copy_(part),
            async_op,
        )

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, received: list[int], sent: list[int], *, group: Group
    ) -> None:
        assert sum(received) == output.numel(), "parts fill the output"
        assert sum(sent) == tensor.numel(), "parts are all of the input"
        _poison(output)

        def combine(given: list[tuple[Tensor, list[int]]]) -> list[Tensor]:
            parts = [torch.split(whole, sizes) for whole, sizes in given]
            return [torch.cat([row[rank] for row in parts]) for rank in range(group.size())]

        self._collective("all_to_all", group, (tensor, sent), combine, output.copy_, False)

    def barrier(self, *, group: Group) -> None:
        self._collective("barrier", group, None, lambda given: given, lambda _: None, False)

    def all_gather_object(self, found: list[Any], value: Any, *, group: Group) -> None:
        sent = pickle.dumps(value)

        def put(values: list[bytes]) -> None:
            found[:] = [pickle.loads(each) for each in values]

        self._collective(
            "all_gather_object", group, sent, lambda given: [given] * len(given), put, False
        )

    def broadcast_object_list(self, box: list[Any], *, group_src: int, group: Group) -> None:
        sent = pickle.dumps(list(box))

        def put(values: bytes) -> None:
            box[:] = pickle.loads(values)

        self._collective(
            "broadcast_object",
            group,
            sent,
            lambda given: [given[group_src]] * len(given),
            put,
            False,
        )

    def _collective(
        self,
        name: str,
        group: Group,
        given: Any,
        combine: Callable[[list[Any]], list[Any]],
        put: Callable[[Any], object],
        async_op: bool,
    ) -> _Work | None:
        """One call of one rank; the n-th of each rank of a group belong together."""
        group.calls += 1
        call = self._calls.setdefault(
            (group.key, group.calls),
            _Call(self._turns.random.random() < 0.7, group.size(), name=name),
        )
        assert call.name == name, f"rank {self._turns.here} calls {name}, others {call.name}"
        place = group.rank()
        call.given[place] = given
        self._streams.put(call, rank=self._turns.here, group=group)

        def finish() -> None:
            if call.results is None:
                call.results = combine([call.given[rank] for rank in range(group.size())])

        if self._streams.has_run(call) and not call.late:
            finish()

        def complete() -> None:
            what = f"{name} of ranks {group.ranks}"
            self._turns.wait(lambda: self._streams.has_run(call), what)
            finish()
            assert call.results is not None
            if call.given[place] is not _TAKEN:
                call.given[place] = _TAKEN
                put(call.results[place])

        work = _Work(complete, lambda: call.given[place] is _TAKEN)
        if async_op:
            return work
        work.wait()
        return None


_TAKEN = object()


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)


def _poison(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _same_kind(sent: Tensor, received: Tensor) -> None:
    assert sent.dtype == received.dtype, f"{sent.dtype} is sent, {received.dtype} expected"
    assert sent.numel() == received.numel(), f"{sent.shape} is sent, {received.shape} expected"
