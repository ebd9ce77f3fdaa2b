"""Fake communicators with the ordering rules of NCCL and without any other ranks.

Communication runs in the communicator's own stream, after all work issued so far to the calling
stream. Waiting for communication makes a stream wait, never the host. A barrier waits for the
device, as NCCL's does. Tensors are held until the communication is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from tests.dry_run.recorder import Recorder
from tests.dry_run.streams import Event, Stream


class FakeGroup:
    """Communicator in place of a :class:`torch.distributed.ProcessGroup`.

    Args:
        ranks: Members of the group.
        rank: Rank of this process, one of `ranks`.
        stream: Stream in which communication runs; None if the group has a single member.
    """

    def __init__(self, ranks: Sequence[int], *, rank: int, stream: Stream | None) -> None:
        self._ranks, self._rank, self.stream = tuple(ranks), rank, stream

    def size(self) -> int:
        """Return the number of members."""
        return len(self._ranks)

    def rank(self) -> int:
        """Return the index of this rank among the members."""
        return self._ranks.index(self._rank)


class FakeWork:
    """Communication in flight, in place of a :class:`torch.distributed.Work`."""

    def __init__(self, recorder: Recorder, done: Event, tensors: Sequence[Tensor]) -> None:
        self._recorder, self._done, self._tensors = recorder, done, tensors

    def wait(self, timeout: object = None) -> bool:
        """Make the current stream wait for the communication, and release its tensors."""
        self._recorder.runtime.current.wait_event(self._done)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        """Return False, as peers may be arbitrarily late."""
        return False


class FakeRanks:
    """Replacements for the functions of :mod:`torch.distributed` that the engine calls.

    Args:
        recorder: Recorder of this rank.
        rank: Rank of this process.
    """

    def __init__(self, recorder: Recorder, *, rank: int) -> None:
        self._recorder, self._rank = recorder, rank

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return the replacements by name of the function of :mod:`torch.distributed`."""
        return {
            "new_group": self._new_group,
            "barrier": self._barrier,
            "isend": self._call("isend", reads=(0,)),
            "send": self._call("send", reads=(0,)),
            "irecv": self._call("irecv", writes=(0,)),
            "recv": self._call("recv", writes=(0,)),
            "broadcast": self._call("broadcast", reads=(0,), writes=(0,)),
            "reduce": self._call("reduce", reads=(0,), writes=(0,)),
            "all_reduce": self._call("all_reduce", reads=(0,), writes=(0,)),
            "all_to_all_single": self._call("all_to_all_single", reads=(1,), writes=(0,)),
            "all_gather": self._call("all_gather", reads=(1,), writes=(0,)),
            "reduce_scatter": self._call("reduce_scatter", reads=(1,), writes=(0,)),
        }

    def _new_group(self, ranks: Sequence[int], **options: Any) -> FakeGroup:
        is_alone = len(ranks) == 1
        name = f"communicator {options.get('group_desc', '')}"
        stream = None if is_alone else self._recorder.runtime.new_stream(name)
        return FakeGroup(ranks, rank=self._rank, stream=stream)

    def _barrier(self, group: Any = None, **_options: Any) -> None:
        self._recorder.runtime.wait_for_current("torch.distributed.barrier")

    def _call(
        self, name: str, *, reads: Sequence[int] = (), writes: Sequence[int] = ()
    ) -> Callable[..., Any]:
        is_asynchronous = name in ("isend", "irecv")

        def function(*args: Any, **options: Any) -> FakeWork | None:
            read = [x for i in reads for x in _tensors(args[i])]
            written = [x for i in writes for x in _tensors(args[i])]
            work = self._begin(name, options["group"], read, written)
            if is_asynchronous or options.get("async_op"):
                return work
            work.wait()
            return None

        return function

    def _begin(
        self, name: str, group: FakeGroup, reads: list[Tensor], writes: list[Tensor]
    ) -> FakeWork:
        runtime = self._recorder.runtime
        assert group.stream is not None, f"{name} among one rank"
        group.stream.learn(runtime.current.clock)  # NCCL does so by itself.
        with runtime.in_stream(group.stream):
            self._recorder.work(name, reads=reads, writes=writes)
            done = Event(runtime)
            done.record()
        return FakeWork(self._recorder, done, [*reads, *writes])


class FakeHostCollectives:
    """:class:`sppo.parallel.host_collectives.HostCollectives` without other ranks."""

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the values of this rank."""
        return list(values)

    largest = total


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_iter(value) if isinstance(x, torch.Tensor)]


REBOUND: Mapping[str, str] = {
    "sppo.parallel.megatron": "all_gather",
    "sppo.parallel.msp_exchange": "all_gather",
    "sppo.parallel.row_messages": "all_gather reduce_scatter",
}
"""Functions of :mod:`torch.distributed` that modules import by name, to be replaced there, too."""
