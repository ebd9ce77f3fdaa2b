"""Part of a lane that writes and reads a file on a disk, in threads of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from sppo.offload.disk.file_tier import FileTier
from sppo.offload.lane import Event
from sppo.offload.worker_pool import WorkerPool


class DiskLane:
    """Writes and reads of a :class:`sppo.offload.lane.Lane`.

    Args:
        begin: Function that every thread calls first; None for none.
    """

    def __init__(self, *, begin: Callable[[], None] | None = None) -> None:
        self._begin_thread = begin
        self._pool: WorkerPool | None = None
        self._file: FileTier | None = None

    def open_file(self, directory: Path, size_bytes: int) -> None:
        """Reserve a file in ``directory``, in place of any earlier file."""
        if self._pool is None:
            self._pool = WorkerPool("sppo disk", begin=self._begin_thread)
        if self._file is not None:
            self._file.close()
            self._file = None
        self._file = FileTier(directory, size_bytes, self._pool)

    def write(self, offset_bytes: int, data: Tensor, *, after: Sequence[Event]) -> Event:
        """Start to write to the file."""
        assert self._file is not None, "open_file() comes before writing"
        return self._file.write(offset_bytes, data.numpy(), after=after)

    def read(self, offset_bytes: int, data: Tensor, *, after: Sequence[Event]) -> Event:
        """Start to read from the file."""
        assert self._file is not None, "open_file() comes before reading"
        return self._file.read(offset_bytes, data.numpy(), after=after)

    def check(self) -> None:
        """Raise the error of the first failed transfer, if any."""
        if self._pool is not None:
            self._pool.check()

    def _drain_disk(self, *, limit_s: float | None = None) -> bool:
        """Skip transfers that have not started; return whether the others ended in time."""
        return self._pool is None or self._pool.drain(limit_s=limit_s)

    def _take_disk_s(self) -> tuple[float, float]:
        """Return the seconds in which the disk was (written, read) since the last call."""
        if self._file is None:
            return 0.0, 0.0
        return self._file.writing.take_s(), self._file.reading.take_s()

    def _end_threads(self, *, waits: bool = True) -> None:
        if self._pool is not None:
            self._pool.close(waits=waits)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
