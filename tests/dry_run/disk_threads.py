"""Fake host threads and files, which do work at once when it is submitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from sppo.offload.queues.copy_queues import Event
from sppo.offload.queues.worker_queue import wait_for
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


class InlineQueue:
    """A :class:`sppo.offload.queues.worker_queue.WorkerQueue` that does submitted work at once.

    Args:
        name: Name of the fake thread.
        runtime: Runtime whose host threads include the fake thread.
    """

    def __init__(self, name: str, *, runtime: Runtime) -> None:
        self._runtime, self._worker = runtime, Worker(name)

    def submit(self, work: Callable[[], None], *, after: Sequence[Event] = ()) -> Future[None]:
        """Do ``work`` as the fake thread, after waiting for the events in ``after``."""
        self._worker.learn(self._runtime.host.clock)
        with self._runtime.on_host(self._worker):
            for event in after:
                wait_for(event)
            work()
            self._worker.work()
        return DoneWork(self._runtime, self._worker)

    def check(self) -> None:
        """Do nothing, since work in a fake thread raises where it is submitted."""

    cancel = check

    def wait_all(self, *, limit_s: float | None = None) -> bool:
        """Return True, since all submitted work is done."""
        return True

    def close(self, *, waits: bool = True) -> None:
        """Do nothing, since there is no thread."""

    def take_busy_s(self) -> float:
        """Return 0, since fake work takes no time."""
        return 0.0


class FakeFile:
    """:class:`sppo.offload.disk.file_tier.FileTier` without a file.

    Args:
        directory: Directory of the file; not used.
        size_bytes: Size of the file; not used.
        recorder: Recorder of the accesses to host memory.
    """

    def __init__(self, directory: Path, size_bytes: int, *, recorder: Recorder) -> None:
        self._recorder = recorder

    def write(self, offset_bytes: int, data: HostBytes) -> FakeFile:
        """Record that a write to the file reads host memory."""
        self._recorder.host_work("write to the file", reads=[data.tensor], writes=[])
        return self

    def read(self, offset_bytes: int, data: HostBytes) -> FakeFile:
        """Record that a read from the file writes host memory."""
        self._recorder.host_work("read from the file", reads=[], writes=[data.tensor])
        return self

    def wait(self) -> None:
        """Return at once."""

    close = wait
