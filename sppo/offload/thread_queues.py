"""Copy queues of a CPU: one thread per direction, and a file that is read and written past them.

Compute is the calling thread itself, so what it has issued is done: events of compute are reached
as soon as there are any, and waiting for a copy means blocking. Device memory is RAM, so the ring
and the staging slots are both host arenas, resident from the start and counted by the planner.
"""

from __future__ import annotations

import errno
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sppo.offload.arena import HostArena
from sppo.offload.copy_report import CopyReport
from sppo.offload.file_tier import FileTier
from sppo.offload.queues import Dependency, Event, Region
from sppo.offload.worker_queue import HostEvent, Lane, Reached, close_lanes

POISON = 0xFF
"""Four or eight such bytes are NaN in every floating dtype."""


class ThreadQueues:
    """:class:`sppo.offload.queues.CopyQueues` of this process's CPU.

    Args:
        poison: overwrite every slot once it is read, so that what reads it again reads NaN.
    """

    def __init__(self, *, poison: bool = False) -> None:
        self._poison = poison
        names = ("copy out", "write", "read", "copy back")
        self._lanes = tuple(Lane(f"sppo {name}") for name in names)
        self._out, self._write, self._read, self._back = self._lanes
        # Also where the queues are just dropped: their threads would wait for work for ever.
        self._end = weakref.finalize(self, close_lanes, self._lanes)
        self._file: FileTier | None = None
        self._directory: Path | None = None
        self._exposed_s = 0.0

    def host_memory(self, size_bytes: int) -> Tensor:
        """See :class:`sppo.offload.queues.CopyQueues`."""
        with HostArena(size_bytes) as arena:  # goes back to the system with this view of it
            return arena.tensor(0, (size_bytes,), torch.uint8)

    def device_memory(self, size_bytes: int) -> Tensor:
        """See :class:`sppo.offload.queues.CopyQueues`; on a CPU that is host memory."""
        return self.host_memory(size_bytes)

    def open_file(self, directory: Path, size_bytes: int) -> None:
        """See :class:`sppo.offload.queues.CopyQueues`."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._file, self._directory = FileTier(directory, size_bytes), directory

    def produced(self, sources: Sequence[Tensor]) -> Event:
        """See :class:`sppo.offload.queues.CopyQueues`."""
        return Reached()

    def copy_out(
        self, host: Region, pieces: Sequence[tuple[int, Tensor]], *, after: Sequence[Dependency]
    ) -> Event:
        """See :class:`sppo.offload.queues.CopyQueues`."""
        target = host.data.numpy()

        def copy() -> None:
            for offset, source in pieces:
                data = as_bytes(source)
                np.copyto(target[offset : offset + data.nbytes], data)

        return self._out.add(copy, after=_events(after))

    def reusable(self, copied: Event) -> None:
        """See :class:`sppo.offload.queues.CopyQueues`; the copy itself held the tensors."""
        self._wait(copied)

    def write(
        self, offset_bytes: int, host: Region, size_bytes: int, *, after: Sequence[Dependency]
    ) -> Event:
        """See :class:`sppo.offload.queues.CopyQueues`."""
        data = host.data.numpy()[:size_bytes]
        return self._write.add(
            lambda: self._transfer(offset_bytes, data, write=True), after=_events(after)
        )

    def read(
        self, host: Region, offset_bytes: int, size_bytes: int, *, after: Sequence[Dependency]
    ) -> Event:
        """See :class:`sppo.offload.queues.CopyQueues`."""
        data = host.data.numpy()[:size_bytes]
        return self._read.add(
            lambda: self._transfer(offset_bytes, data, write=False), after=_events(after)
        )

    def copy_back(
        self, ring: Region, host: Region, size_bytes: int, *, after: Sequence[Dependency]
    ) -> Event:
        """See :class:`sppo.offload.queues.CopyQueues`."""
        target, source = ring.data.numpy()[:size_bytes], host.data.numpy()[:size_bytes]

        def copy() -> None:
            np.copyto(target, source)
            if self._poison:
                source.fill(POISON)

        return self._back.add(copy, after=_events(after))

    def use(self, ring: Region, back: Event) -> None:
        """See :class:`sppo.offload.queues.CopyQueues`."""
        self._wait(back)

    def used(self, ring: Region) -> Event:
        """See :class:`sppo.offload.queues.CopyQueues`."""
        if self._poison:
            ring.data.fill_(POISON)
        return Reached()

    def check(self) -> None:
        """See :class:`sppo.offload.queues.CopyQueues`."""
        for lane in self._lanes:
            lane.check()

    def abort(self) -> None:
        """See :class:`sppo.offload.queues.CopyQueues`."""
        for lane in self._lanes:
            lane.cancel()
        for lane in self._lanes:
            lane.wait_all()

    def take_times(self) -> CopyReport:
        """See :class:`sppo.offload.queues.CopyQueues`."""
        busy = [lane.take_busy_s() for lane in self._lanes]
        exposed_s, self._exposed_s = self._exposed_s, 0.0
        return CopyReport(exposed_s=exposed_s, out_s=max(busy[:2]), back_s=max(busy[2:]))

    def close(self) -> None:
        """See :class:`sppo.offload.queues.CopyQueues`."""
        self._end()
        if self._file is not None:
            self._file.close()

    def _wait(self, event: Event) -> None:
        """Block until ``event``; what that takes is exposed."""
        if event.done:
            _wait_on_host(event)  # for its error
            return
        start = time.perf_counter()
        try:
            _wait_on_host(event)
        finally:
            self._exposed_s += time.perf_counter() - start

    def _transfer(self, offset_bytes: int, data: NDArray[np.uint8], *, write: bool) -> None:
        assert self._file is not None, "open_file() comes before reading and writing"
        start = self._file.write if write else self._file.read
        try:
            start(offset_bytes, data).wait()
        except OSError as error:
            verb, code = "writing" if write else "reading", error.errno or errno.EIO
            raise OSError(
                code,
                f"the disk failed while {verb} {data.nbytes} bytes of saved activations "
                f"({error.strerror}); nothing was computed from them",
                str(self._directory),
            ) from None
        if write and self._poison:
            data.fill(POISON)


def as_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous CPU tensor, without a copy."""
    assert tensor.is_contiguous(), "a tensor is moved in one piece"
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def _events(after: Sequence[Dependency]) -> list[HostEvent]:
    return [_host_event(event) for _, event in after]


def _host_event(event: Event) -> HostEvent:
    assert isinstance(event, HostEvent), f"{event} is not of these queues"
    return event


def _wait_on_host(event: Event) -> None:
    _host_event(event).wait()
