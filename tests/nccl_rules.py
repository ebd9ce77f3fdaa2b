"""Process group with NCCL's rules over gloo, for tests of communication between GPUs.

The thread that issues communication is the compute stream: its work is done in issue order. Each
communicator is a stream of its own.

* Operations of one communicator on a rank (sends, receives and collectives) run in issue order, as
  torch does with communicators that are bound to a device; each starts after the one before it has
  ended. Gloo has no order between messages of different ranks or directions.
* A send runs when the matching receive runs, a collective when all ranks have reached it.
* ``wait()`` blocks compute until the operation has run. Received data exists only from then on: a
  reader that does not wait finds NaN.
* Data is read when the send runs, and must not change before.
* On request, all communicators of a rank share one stream. That is the worst order that
  ``NCCL_LAUNCH_ORDER_IMPLICIT`` can cause: a program that ends in this order ends in any other.
  :func:`await_issued` then blocks the host as the first launch of a kernel does, which loads code.
* A rank that has died does not answer, and no other rank is told. A rank that waits too long gets
  a timeout error, as NCCL's watchdog would end it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "nccl_rules"


class RulesWork:
    """Something that was asked of a communicator.

    Args:
        what: is done, for messages.
        limit_s: longest time from now until it has ended.
        results: (target, what arrives there) once somebody has waited.
    """

    def __init__(
        self, what: str, *, limit_s: float, results: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        self.what, self._until_s = what, time.monotonic() + limit_s
        self._limit_s = limit_s
        self._results = list(results)
        self._ended = threading.Event()
        self.error: BaseException | None = None

    def run(self, act: Callable[[], None]) -> None:
        """Do it, in the communicator's thread."""
        try:
            act()
        except AssertionError as error:
            self.error = error
        except RuntimeError:  # of gloo, that a rank is gone or does not answer
            time.sleep(max(0.0, self._until_s - time.monotonic()))
            self.error = self._too_late()
        self._ended.set()

    def ended(self) -> None:
        """Return once it has ended, or raise its error."""
        if not self._ended.wait(max(0.0, self._until_s - time.monotonic())):
            raise self._too_late()
        if self.error is not None:
            raise self.error

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Hold compute up until it has ended."""
        self.ended()
        for target, found in self._results:
            target.copy_(found)
        self._results.clear()
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def _too_late(self) -> RuntimeError:
        return RuntimeError(f"Timed out waiting {1e3 * self._limit_s:.0f}ms for {self.what}")


class Stream:
    """Runs what communicators are asked for, in turn; nothing more after something has failed."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[tuple[RulesWork, Callable[[], None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="communicator", daemon=True)
        self._thread.start()

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    def put(self, work: RulesWork, act: Callable[[], None]) -> None:
        self._asked.put((work, act))

    def end(self) -> None:
        self._asked.put(None)

    def _serve(self) -> None:
        while (asked := self._asked.get()) is not None:
            work, act = asked
            work.run(act)
            if work.error is not None:
                return


_issued: list[RulesWork] = []
"""What this process has asked of communicators with a shared stream, as far as it may still run."""
_shared: list[Stream] = []
"""The stream of this process that all its communicators share, where they share one."""


class RulesGroup(dist.ProcessGroup):
    """A communicator: what is asked of it runs in a stream, in turn."""

    longest_s = float("inf")
    """Longest time for anything, in tests of what must not end."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self.limit_s = min(self.longest_s, timeout.total_seconds())
        """Longest time from when something is asked for until it has ended."""
        self._gloo = dist.ProcessGroupGloo(
            dist.PrefixStore("under the rules", store), rank, size, timeout
        )
        self._shares = bool(_shared)
        self._stream = _shared[0] if self._shares else Stream()

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        return NAME

    def shutdown(self) -> None:
        if not self._shares:
            self._stream.end()

    def die(self) -> None:
        """Drop all connections, as the end of the process would."""
        self.shutdown()
        self._gloo = None

    # What torch.distributed asks for. Names of torch 2.13, and those of 2.11.

    def send(self, tensors: list[Tensor], to: int, tag: int) -> RulesWork:
        (tensor,) = tensors
        before = tensor.clone()

        def act() -> None:
            wanted = torch.empty(1, dtype=torch.int64)
            self._gloo.recv([wanted], to, 0).wait()
            size = tensor.numel() * tensor.element_size()
            assert int(wanted) == size, f"rank {to} receives {int(wanted)} bytes, {size} are sent"
            self._gloo.send([tensor], to, 0).wait()
            same = torch.equal(tensor, before)
            assert same or bool(tensor.isnan().any()), "a message was changed before it was sent"

        return self._ask(f"a send to {to}", act)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> RulesWork:
        (tensor,) = tensors
        found = torch.empty_like(tensor)

        def act() -> None:
            size = torch.tensor([tensor.numel() * tensor.element_size()])
            self._gloo.send([size], source, 0).wait()
            self._gloo.recv([found], source, 0).wait()

        return self._ask(f"a receive from {source}", act, results=[(tensor, found)])

    def broadcast(self, tensors: list[Tensor], opts: Any) -> RulesWork:
        (tensor,) = tensors
        is_root = opts.rootRank == self._rank
        found = tensor if is_root else torch.empty_like(tensor)

        def act() -> None:
            sent = tensor.contiguous() if is_root else found
            self._gloo.broadcast([sent], opts).wait()

        return self._meet("a broadcast", act, results=[] if is_root else [(tensor, found)])

    def allreduce(self, tensors: list[Tensor], opts: Any) -> RulesWork:
        (tensor,) = tensors
        found = torch.empty_like(tensor)

        def act() -> None:
            found.copy_(tensor)
            self._gloo.allreduce([found], opts).wait()

        return self._meet("an all-reduce", act, results=[(tensor, found)], poison=False)

    def reduce(self, tensors: list[Tensor], opts: Any) -> RulesWork:
        (tensor,) = tensors
        found = torch.empty_like(tensor)

        def act() -> None:
            found.copy_(tensor)
            self._gloo.reduce([found], opts).wait()

        return self._meet("a reduce", act, results=[(tensor, found)], poison=False)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any) -> RulesWork:
        found = torch.empty_like(output)

        def act() -> None:
            parts = list(torch.chunk(found.view(-1), self._size))
            self._gloo.allgather([parts], [own.reshape(-1).clone()]).wait()

        return self._meet("an all-gather", act, results=[(output, found)], poison=False)

    def reduce_scatter_single(self, output: Tensor, everything: Tensor, opts: Any) -> RulesWork:
        found = torch.empty_like(output)

        def act() -> None:
            total = everything.clone()
            self._gloo.allreduce([total]).wait()
            found.view(-1).copy_(torch.chunk(total.view(-1), self._size)[self._rank])

        return self._meet("a reduce-scatter", act, results=[(output, found)], poison=False)

    def all_to_all_single(
        self,
        output: Tensor,
        own: Tensor,
        out_sizes: list[int] | None,
        in_sizes: list[int] | None,
        opts: Any = None,
    ) -> RulesWork:
        found = torch.empty_like(output)

        def act() -> None:
            equal = [own.shape[0] // self._size] * self._size
            sent = torch.split(own, in_sizes or equal)
            received = torch.split(found, out_sizes or equal)
            received[self._rank].copy_(sent[self._rank])
            for step in range(1, self._size):
                to, source = (self._rank + step) % self._size, (self._rank - step) % self._size
                works = []
                if sent[to].numel():
                    works.append(self._gloo.send([sent[to].contiguous()], to, step))
                if received[source].numel():
                    works.append(self._gloo.recv([received[source]], source, step))
                for work in works:
                    work.wait()

        return self._meet("an all-to-all", act, results=[(output, found)])

    def barrier(self, opts: Any = None) -> RulesWork:
        return self._meet("a barrier", lambda: None)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def _meet(self, what: str, act: Callable[[], None], **more: Any) -> RulesWork:
        """Do something that all ranks do, once all of them have come to it."""

        def together() -> None:
            everyone = torch.ones(1)
            self._gloo.allreduce([everyone]).wait()
            act()

        return self._ask(what, together, **more)

    def _ask(
        self,
        what: str,
        act: Callable[[], None],
        *,
        results: Sequence[tuple[Tensor, Tensor]] = (),
        poison: bool = True,
    ) -> RulesWork:
        for target, _ in results if poison else ():
            target.fill_(float("nan") if target.is_floating_point() else -1)
        work = RulesWork(what, limit_s=self.limit_s, results=results)
        self._stream.put(work, act)
        if self._shares:
            _issued.append(work)
        return work


def await_issued() -> None:
    """Wait until everything that communicators with a shared stream were asked for has ended.

    Data arrives only where somebody waits for it.
    """
    while _issued:
        _issued.pop(0).ended()


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> RulesGroup:
    return RulesGroup(store, rank, size, timeout)


_kept: list[Stream] = []


@contextmanager
def nccl_rules(*, one_stream: bool = False) -> Any:
    """Within, groups are made with NCCL's rules where no other backend is named.

    Args:
        one_stream: all that are made so in this process share a stream.
    """
    if one_stream and not (_kept and _kept[0].runs):
        _kept[:] = [Stream()]
    _shared[:] = _kept if one_stream else []
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=["cpu"])
    original = dist.new_group

    def new_group(*arguments: Any, backend: str | None = None, **options: Any) -> Any:
        return original(*arguments, backend=backend or NAME, **options)

    try:
        with mock.patch.object(dist, "new_group", new_group):
            yield
    finally:
        _shared.clear()
        _issued.clear()
