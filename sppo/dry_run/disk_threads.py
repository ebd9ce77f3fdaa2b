"""Fake host threads and files: work is done at once, in the order it is submitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from sppo.dry_run.recorder import Recorder
from sppo.dry_run.streams import Runtime, Worker
from sppo.dry_run.tensor_functions import HostBytes
from sppo.offload.queues import Event
from sppo.offload.worker_queue import wait_for


class DoneWork(Future[None]):
    """The end of a thread's work; whoever waits for it learns what the thread knew."""

    def __init__(self, runtime: Runtime, worker: Worker) -> None:
        super().__init__()
        self._runtime, self._name, self._clock = runtime, worker.name, dict(worker.clock)
        self.set_result(None)

    def exception(self, timeout: float | None = None) -> None:
        """Let this host thread wait for the end."""
        self._runtime.wait(self._runtime.host, self._clock, awaited=self._name)


class InlineQueue:
    """:class:`sppo.offload.worker_queue.WorkerQueue` that does work when it is submitted.

    Args:
        name: of the thread.
        runtime: whose hosts it is one of.
    """

    def __init__(self, name: str, *, runtime: Runtime) -> None:
        self._runtime, self._worker = runtime, Worker(name)

    def submit(self, work: Callable[[], None], *, after: Sequence[Event] = ()) -> Future[None]:
        """Do ``work`` in this thread's name, after what it waits for."""
        self._worker.learn(self._runtime.host.clock)
        with self._runtime.on_host(self._worker):
            for event in after:
                wait_for(event)
            work()
            self._worker.work()
        return DoneWork(self._runtime, self._worker)

    def check(self) -> None:
        """Do nothing: nothing fails."""

    cancel = check

    def wait_all(self, *, limit_s: float | None = None) -> bool:
        """Return True: all work is done."""
        return True

    def close(self, *, waits: bool = True) -> None:
        """Do nothing: there is no thread."""

    def take_busy_s(self) -> float:
        """Return 0."""
        return 0.0


class FakeFile:
    """:class:`sppo.offload.file_tier.FileTier` without a file.

    Args:
        directory: of the file.
        size_bytes: of it.
        recorder: takes in what is read and written of host memory.
    """

    def __init__(self, directory: Path, size_bytes: int, *, recorder: Recorder) -> None:
        self._recorder = recorder

    def write(self, offset_bytes: int, data: HostBytes) -> FakeFile:
        """Read host memory."""
        self._recorder.host_work("write to the file", reads=[data.tensor], writes=[])
        return self

    def read(self, offset_bytes: int, data: HostBytes) -> FakeFile:
        """Write host memory."""
        self._recorder.host_work("read from the file", reads=[], writes=[data.tensor])
        return self

    def wait(self) -> None:
        """Return at once."""

    close = wait
