"""Copies of training state between a device and the tier behind it.

Both directions run on their own, in the order they were asked for, while the host goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from sppo.offload.copy_streams import CopyStreams, copy_in_pieces
from sppo.offload.cuda_queues import CudaQueues
from sppo.offload.worker_queue import WorkerQueue, close_queues, wait_for

_cuda: Any = torch.cuda  # parts of it have no types

Copy = tuple[Tensor, Tensor]
"""(target, source), of one shape and dtype."""


class Done(Protocol):
    """The end of some copies."""

    def wait(self) -> None:
        """Block the host until they are done."""
        ...

    def before_compute(self) -> None:
        """Let compute issued from now on come after them."""
        ...


class Transfers(Protocol):
    """The copies of one device."""

    def memory(self, size_bytes: int) -> Tensor:
        """Host memory that copies are fast to and from, uint8.

        Raises:
            MemoryError: there is not that much, or it may not be locked.
        """
        ...

    def down(self, copies: Sequence[Copy]) -> Done:
        """Start to copy from the device what compute issued so far has written."""
        ...

    def up(self, copies: Sequence[Copy]) -> Done:
        """Start to copy to the device, after compute issued so far has read what was there."""
        ...

    def finish(self) -> None:
        """Compute issued from now on finds everything that went up."""
        ...

    def wait_for_device(self) -> bool:
        """Return True when the device has done all work, False if it does not in time, or fails.

        After that nothing may be issued to it, and what it may still use has to stay.
        """
        ...

    def close(self) -> None:
        """End copies, and free what they need; closing again does nothing.

        Host memory stays valid, but nothing is copied to or from it any more.
        """
        ...


class CudaTransfers:
    """:class:`Transfers` of a CUDA device: a stream per direction, page-locked host memory.

    Blocks of activations pass the same copy engine in other streams, and would wait for the whole
    of an embedding: so these copies, too, are cut into pieces.

    Args:
        device: whose state is copied.
        give_up_s: seconds that :meth:`wait_for_device` waits; None: as long as it takes.
    """

    def __init__(self, device: torch.device, *, give_up_s: float | None = None) -> None:
        self._device = device
        self._streams = CopyStreams(_cuda, device, give_up_s=give_up_s)
        self._down, self._up = self._streams.out, self._streams.back
        self._last: Any = None
        self._holders: list[CudaQueues] = []

    def memory(self, size_bytes: int) -> Tensor:
        """Return page-locked host memory of that size, uint8, in one block."""
        self._holders.append(CudaQueues(self._device, streams=self._streams))
        return self._holders[-1].host_memory(size_bytes)

    def down(self, copies: Sequence[Copy]) -> Done:
        """Start to copy from the device, behind compute issued so far, on a stream of its own."""
        return self._copy(self._down, copies)

    def up(self, copies: Sequence[Copy]) -> Done:
        """Start to copy to the device, behind compute issued so far, on a stream of its own."""
        self._last = self._copy(self._up, copies)
        return _StreamDone(self._last.event, self._device)

    def finish(self) -> None:
        """Let compute issued from now on wait for the last copy up."""
        if self._last is not None:
            self._last.before_compute()

    def wait_for_device(self) -> bool:
        """Return True when the device has done all work, False if it does not in time, or fails."""
        return self._streams.wait_for_device()

    def close(self) -> None:
        """Wait for the device, and unlock the host memory; closing again does nothing.

        Where the device does not end its work in time, all of it is left to the end of the process.
        """
        for holder in self._holders:
            holder.close()

    def _copy(self, stream: Any, copies: Sequence[Copy]) -> _StreamDone:
        stream.wait_stream(_cuda.current_stream(self._device))
        with torch.no_grad(), _cuda.stream(stream):
            for target, source in copies:
                copy_in_pieces(target, source)
            event = _cuda.Event()
            event.record(stream)
        return _StreamDone(event, self._device)


class _StreamDone:
    """A point in a stream."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self.event, self._device = event, device

    def wait(self) -> None:
        """Return when the device has reached this point of its stream."""
        self.event.synchronize()

    def before_compute(self) -> None:
        """Let the compute stream wait for it."""
        _cuda.current_stream(self._device).wait_event(self.event)


class ThreadTransfers:
    """:class:`Transfers` of a CPU, whose tier is a file: a thread copies in each direction.

    Args:
        after_each: called when a tensor has been copied.
    """

    def __init__(self, after_each: Callable[[], None]) -> None:
        self._copy_all = partial(_copy_all, after_each)
        self._down, self._up = WorkerQueue("sppo state out"), WorkerQueue("sppo state back")
        self._last: _ThreadDone | None = None

    def memory(self, size_bytes: int) -> Tensor:
        """Return memory of that size, uint8."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def down(self, copies: Sequence[Copy]) -> Done:
        """Start to copy to the tier."""
        return _ThreadDone(self._down.submit(partial(self._copy_all, copies)))

    def up(self, copies: Sequence[Copy]) -> Done:
        """Start to copy from the tier."""
        self._last = _ThreadDone(self._up.submit(partial(self._copy_all, copies)))
        return self._last

    def finish(self) -> None:
        """Wait for the last copy up."""
        if self._last is not None:
            self._last.wait()

    def wait_for_device(self) -> bool:
        """Return True: a CPU's work is done when it is issued, and copies wait for no other."""
        return True

    def close(self) -> None:
        """Leave out copies that have not begun, and end the threads."""
        close_queues((self._down, self._up))


class _ThreadDone:
    """The end of some work of a thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Return when the work is done."""
        wait_for(self._future)

    def before_compute(self) -> None:
        """Return when the work is done: compute is done where it is issued."""
        self.wait()


@torch.no_grad()
def _copy_all(after_each: Callable[[], None], copies: Sequence[Copy]) -> None:
    for target, source in copies:
        target.copy_(source)
        after_each()
