"""Fake host threads and files, which do work at once when it is submitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from torch import Tensor

from sppo.offload.worker_pool import Event, wait_for
from tests.dry_run.recorder import Recorder
from tests.dry_run.streams import Runtime, Worker
from tests.dry_run.tensor_functions import HostBytes


class DoneWork(Future[None]):
    """Future of a fake thread's work; a waiting host thread takes over the thread's clock."""

    def __init__(self, runtime: Runtime, worker: Worker) -> None:
        super().__init__()
        self._runtime, self._name, self._clock = runtime, worker.name, dict(worker.clock)
        self.set_result(None)

    def exception(self, timeout: float | None = None) -> None:
        """Make the current host thread wait for the end of the work; return None."""
        self._runtime.wait(self._runtime.host, self._clock, awaited=self._name)


class FakeFile:
    """:class:`sppo.offload.disk.file_tier.FileTier` without a file, whose threads work at once.

    Args:
        begin: Function that a thread calls first; not called.
        recorder: Recorder of the accesses to host memory.
    """

    def __init__(self, *, begin: Callable[[], None] | None = None, recorder: Recorder) -> None:
        self._recorder, self._runtime = recorder, recorder.runtime

    def open(self, directory: Path, size_bytes: int) -> None:
        """Do nothing, since there is no file."""

    def write(self, offset_bytes: int, data: HostBytes, *, after: Sequence[Event]) -> Future[None]:
        """Record that a write to the file reads host memory."""
        return self._work("write to the file", after, reads=[data.tensor])

    def read(self, offset_bytes: int, data: HostBytes, *, after: Sequence[Event]) -> Future[None]:
        """Record that a read from the file writes host memory."""
        return self._work("read from the file", after, writes=[data.tensor])

    def _work(
        self,
        what: str,
        after: Sequence[Event],
        *,
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
    ) -> Future[None]:
        """Work in a fake thread of its own, after waiting for the events in ``after``."""
        worker = Worker("sppo disk")
        worker.learn(self._runtime.host.clock)
        with self._runtime.on_host(worker):
            for event in after:
                wait_for(event)
            self._recorder.host_work(what, reads=reads, writes=writes)
            worker.work()
        return DoneWork(self._runtime, worker)

    def take_s(self) -> tuple[float, float]:
        """Return the seconds of writes and reads, which take none."""
        return 0.0, 0.0

    def close(self, *, limit_s: float | None = None) -> bool:
        """Return True, since all submitted work is done."""
        return True
