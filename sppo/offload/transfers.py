"""Asynchronous copies of training state between a device and the next tier.

Each direction is a queue of its own, which runs its copies in the order of the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from sppo.offload.queues.copy_streams import CopyStreams, copy_in_pieces
from sppo.offload.queues.cuda_queues import CudaQueues
from sppo.offload.queues.worker_queue import WorkerQueue, close_queues, wait_for

_cuda: Any = torch.cuda  # parts of torch.cuda are untyped

Copy = tuple[Tensor, Tensor]
"""Copy as (target, source), tensors of the same shape and dtype."""


class CopyHandle(Protocol):
    """Completion of the copies of one call."""

    def wait(self) -> None:
        """Block the host until the copies are done."""
        ...

    def before_compute(self) -> None:
        """Make compute issued from now on wait for the copies."""
        ...


class Transfers(Protocol):
    """Copies of training state of one device: to the next tier, and back to the device."""

    def memory(self, size_bytes: int) -> Tensor:
        """Return host memory for fast copies, uint8.

        Raises:
            MemoryError: The host lacks memory, or the memory may not be page-locked.
        """
        ...

    def to_tier(self, copies: Sequence[Copy]) -> CopyHandle:
        """Start copies from the device, after all compute issued so far."""
        ...

    def to_device(self, copies: Sequence[Copy]) -> CopyHandle:
        """Start copies to the device, after all compute issued so far."""
        ...

    def finish(self) -> None:
        """Make compute issued from now on wait for all copies to the device."""
        ...

    def wait_for_device(self) -> bool:
        """Wait for all work of the device; return False if it fails or does not finish in time.

        After False, no work may be issued to the device, and memory that it may use must be kept.
        """
        ...

    def close(self) -> None:
        """End all copies and free their resources; repeated calls do nothing.

        Host memory stays valid, but may not be copied any more.
        """
        ...


class CudaTransfers:
    """:class:`Transfers` of a CUDA device: a stream per direction, page-locked host memory.

    Copies are cut into pieces, because blocks of activations use the same copy engine in other
    streams, and would otherwise wait for a whole embedding.

    Args:
        device: Device whose state is copied.
        failed_step_timeout_s: Longest wait of :meth:`wait_for_device` in seconds; None for no
            limit.
    """

    def __init__(self, device: torch.device, *, failed_step_timeout_s: float | None = None) -> None:
        self._device = device
        self._streams = CopyStreams(_cuda, device, failed_step_timeout_s=failed_step_timeout_s)
        self._to_tier, self._to_device = self._streams.out, self._streams.back
        self._last: Any = None
        self._holders: list[CudaQueues] = []

    def memory(self, size_bytes: int) -> Tensor:
        """Return page-locked host memory of that size, uint8, in one block."""
        self._holders.append(CudaQueues(self._device, streams=self._streams))
        return self._holders[-1].host_memory(size_bytes)

    def to_tier(self, copies: Sequence[Copy]) -> CopyHandle:
        """Start copies from the device in their own stream, after compute issued so far."""
        return self._copy(self._to_tier, copies)

    def to_device(self, copies: Sequence[Copy]) -> CopyHandle:
        """Start copies to the device in their own stream, after compute issued so far."""
        self._last = self._copy(self._to_device, copies)
        return _StreamDone(self._last.event, self._device)

    def finish(self) -> None:
        """Make compute issued from now on wait for the last copy to the device."""
        if self._last is not None:
            self._last.before_compute()

    def wait_for_device(self) -> bool:
        """Wait for all work of the device; return False if it fails or does not finish in time."""
        return self._streams.wait_for_device()

    def close(self) -> None:
        """Wait for the device, and unlock the host memory; repeated calls do nothing.

        If the device does not finish in time, the memory stays locked until the process ends.
        """
        for holder in self._holders:
            holder.close()

    def _copy(self, stream: Any, copies: Sequence[Copy]) -> _StreamDone:
        stream.wait_stream(_cuda.current_stream(self._device))
        with torch.no_grad(), _cuda.stream(stream):
            for target, source in copies:
                host = target if stream is self._to_tier else source
                copy_in_pieces(target, source, host=host)
            event = _cuda.Event(blocking=True)  # a host that spins takes a core of the optimizer
            event.record(stream)
        return _StreamDone(event, self._device)


class _StreamDone:
    """Completion of copies in a stream."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self.event, self._device = event, device

    def wait(self) -> None:
        """Block the host until the device has done the copies."""
        self.event.synchronize()

    def before_compute(self) -> None:
        """Make the compute stream wait for the copies."""
        _cuda.current_stream(self._device).wait_event(self.event)


class ThreadTransfers:
    """:class:`Transfers` of a CPU, whose next tier is a file: one thread per direction.

    Args:
        after_each: Called after each copied tensor.
    """

    def __init__(self, after_each: Callable[[], None]) -> None:
        self._copy_all = partial(_copy_all, after_each)
        self._to_tier, self._to_device = (
            WorkerQueue("sppo state out"),
            WorkerQueue("sppo state back"),
        )
        self._last: _ThreadDone | None = None

    def memory(self, size_bytes: int) -> Tensor:
        """Return memory of ``size_bytes``, uint8."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def to_tier(self, copies: Sequence[Copy]) -> CopyHandle:
        """Start copies to the tier."""
        return _ThreadDone(self._to_tier.submit(partial(self._copy_all, copies)))

    def to_device(self, copies: Sequence[Copy]) -> CopyHandle:
        """Start copies from the tier."""
        self._last = _ThreadDone(self._to_device.submit(partial(self._copy_all, copies)))
        return self._last

    def finish(self) -> None:
        """Wait for the last copy to the device."""
        if self._last is not None:
            self._last.wait()

    def wait_for_device(self) -> bool:
        """Return True: a CPU completes work when it is issued."""
        return True

    def close(self) -> None:
        """Skip copies that have not started, and end the threads."""
        close_queues((self._to_tier, self._to_device))


class _ThreadDone:
    """Completion of copies by a thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Wait until the copies are done."""
        wait_for(self._future)

    def before_compute(self) -> None:
        """Wait until the copies are done, because compute runs in the calling thread."""
        self.wait()


@torch.no_grad()
def _copy_all(after_each: Callable[[], None], copies: Sequence[Copy]) -> None:
    for target, source in copies:
        target.copy_(source)
        after_each()
