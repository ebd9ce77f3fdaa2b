"""Lane of a CUDA device: two copy streams, events, page-locked host memory, and the disk behind it.

Compute runs in the stream that is current when a method is called. The caller keeps the tensors of
a copy out until compute has been made to wait for the copy, so that the allocator cannot reuse
their memory too early. ``record_stream`` is therefore not needed, and the time at which memory is
freed does not depend on how far the host has run ahead.

The calling thread issues all copies. It waits for a disk only where a copy out needs a slot that is
not written yet, or a copy back one that is not read yet. The threads of the disk select the rank's
device when they start, and sleep instead of spinning while they wait for the device.

After a failure, no method waits longer for the device than ``failed_step_timeout_s``. Memory that
an unresponsive device may still use is kept until the process ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sppo.offload.copy_report import CopyReport
from sppo.offload.device_wait import wait_with_timeout
from sppo.offload.lane import Copy, Lane
from sppo.offload.page_lock import PIECE_BYTES, LockedArena, spans
from sppo.offload.worker_pool import Event, wait_for

_cuda: Any = torch.cuda  # parts of torch.cuda are untyped


class StreamEvent:
    """Point in a stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        """Return whether the device has reached the event."""
        return bool(_cuda.Event.query(self.event))

    def exception(self) -> None:
        """Block until the device reaches the event."""
        self.event.synchronize()


class CudaLane(Lane):
    """Lane of one CUDA device.

    Args:
        device: CUDA device.
        most_host_bytes: Host memory up to which that of each name grows in place.
        is_timed: Whether :meth:`take_times` is called after every step.
        failed_step_timeout_s: Longest wait for the device after a failure, in seconds; None for no
            limit.
    """

    reads_to_device = False

    def __init__(
        self,
        device: torch.device,
        *,
        most_host_bytes: int = 0,
        is_timed: bool = True,
        failed_step_timeout_s: float | None = None,
    ) -> None:
        super().__init__(begin=partial(_cuda.set_device, device))
        self._device, self._is_timed = device, is_timed
        self._failed_step_timeout_s = failed_step_timeout_s
        self._out, self._back = (_cuda.Stream(device) for _ in range(2))
        self._most_host_bytes = most_host_bytes
        self._arenas: dict[str, LockedArena] = {}
        self._timings: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}
        self._closed = False
        self.given_up = False
        """True if the device did not finish in time or failed: nothing may wait for it any more."""

    def host_memory(self, name: str, size_bytes: int) -> Tensor:
        """Return page-locked host memory, in place of that of earlier calls of this name.

        Raises:
            MemoryError: The machine lacks memory, or the driver refuses to page-lock it.
        """
        if name not in self._arenas:
            self._arenas[name] = LockedArena(_cuda.cudart(), most_bytes=self._most_host_bytes)
        return self._arenas[name].memory(size_bytes)

    def device_memory(self, size_bytes: int) -> Tensor:
        """Allocate device memory."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def computed(self, tensors: Sequence[Tensor]) -> Event:
        """Record an event after the compute issued so far."""
        event = _cuda.Event()
        event.record(_cuda.current_stream(self._device))
        return StreamEvent(event)

    def out(self, copies: Sequence[Copy], *, after: Sequence[Event]) -> Event:
        """Issue copies to page-locked memory in the stream out."""
        return self._issue("out", copies, after)

    def back(self, copies: Sequence[Copy], *, after: Sequence[Event]) -> Event:
        """Issue copies from page-locked memory in the stream back."""
        return self._issue("back", copies, after)

    def before_compute(self, event: Event) -> None:
        """Make the compute stream wait for a copy, and count the wait as exposed."""
        assert isinstance(event, StreamEvent), "compute waits for copies in streams"
        stream = _cuda.current_stream(self._device)
        end = self._begin("compute", stream)
        stream.wait_event(event.event)
        end.record(stream)

    def settle(self) -> None:
        """Wait until the device has done all copies.

        Raises:
            RuntimeError: The device does not answer, and may still copy to and from the memory.
        """
        if not self._wait_for_device():
            raise RuntimeError(
                "the device does not answer, and may still copy to and from the memory of "
                "offloaded tensors: the step cannot start"
            )

    def take_times(self) -> CopyReport:
        """Return the times since the last call; waits for the device, so call it between steps."""
        _cuda.synchronize(self._device)
        seconds = {
            name: sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3
            for name, pairs in self._timings.items()
        }
        exposed_s = seconds.get("compute", 0.0) + self._exposed_s
        self._timings, self._exposed_s = {}, 0.0
        write_s, read_s = self.file.take_s()
        return CopyReport(
            exposed_s=exposed_s,
            out_s=max(seconds.get("out", 0.0), write_s),
            back_s=max(seconds.get("back", 0.0), read_s),
        )

    def close(self) -> bool:
        """Skip transfers that have not started, and free file and memory; may be repeated.

        Returns:
            Whether the device has done all copies in time; if not, it may still use file and
            memory, which are kept until the process ends.
        """
        if self._closed:
            return not self.given_up
        if not self.file.close(limit_s=0.0 if self.given_up else self._failed_step_timeout_s):
            self.given_up = True
        if self._wait_for_device():
            for arena in self._arenas.values():
                arena.release()
        self._closed = True  # last, so that an interrupted close can be repeated
        return not self.given_up

    def _wait_for_device(self) -> bool:
        """Wait for all work of the device; return False if it fails or does not finish in time."""
        if self.given_up:
            return False
        streams = (_cuda.current_stream(self._device), self._out, self._back)
        try:
            if self._failed_step_timeout_s is None:
                _cuda.synchronize(self._device)
                return True
            done = wait_with_timeout(
                _cuda, self._device, streams, stall_timeout_s=self._failed_step_timeout_s
            )
        except RuntimeError:  # the device failed; the caller already reports another error
            done = False
        self.given_up = not done
        return done

    def _issue(self, name: str, copies: Sequence[Copy], after: Sequence[Event]) -> StreamEvent:
        """Issue copies in a stream, after the host has waited for the disk if it must."""
        stream = self._out if name == "out" else self._back
        for event in after:
            if isinstance(event, StreamEvent):
                stream.wait_event(event.event)
                continue
            begin_s = time.perf_counter()
            wait_for(event)
            self._exposed_s += time.perf_counter() - begin_s
        with torch.no_grad(), _cuda.stream(stream):
            end = self._begin(name, stream)
            for target, source in copies:
                copy_in_pieces(target, source, host=target if name == "out" else source)
            end.record(stream)
        return StreamEvent(end)

    def _begin(self, name: str, stream: Any) -> torch.cuda.Event:
        """Begin to time something in a stream; return the event to record at its end."""
        # A host thread that waits for the event sleeps: spinning takes a core from compute.
        end: torch.cuda.Event = _cuda.Event(enable_timing=self._is_timed, blocking=True)
        if self._is_timed:
            begin = _cuda.Event(enable_timing=True)
            begin.record(stream)
            self._timings.setdefault(name, []).append((begin, end))
        return end


def copy_in_pieces(target: Tensor, source: Tensor, *, host: Tensor) -> None:
    """Copy between host and device in the current stream, in pieces of :data:`PIECE_BYTES`.

    Args:
        target: Contiguous tensor with as many bytes as ``source``.
        source: Contiguous tensor.
        host: The one of both in host memory, by whose addresses the copy is cut.
    """
    into, data = (tensor.view(-1).view(torch.uint8) for tensor in (target, source))
    assert into.numel() == data.numel(), f"{data.numel()} bytes into {into.numel()}"
    for begin, end in spans(host, most_bytes=PIECE_BYTES):
        into[begin:end].copy_(data[begin:end], non_blocking=True)
