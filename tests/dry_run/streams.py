"""Streams, events and host threads of a fake GPU, which track the order of work but no time.

Each worker, a stream or a host thread, numbers its work items and has a vector clock (Mattern,
"Virtual time and global states of distributed systems", 1989): the number of work items of every
other worker that are done before its next one. Waiting for an event merges the clock at which the
event was recorded. A work item is ordered before another if the other's worker had it in its clock;
otherwise the two are unordered.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

Clock = dict[int, int]
"""Number of the last work item known to be done, by number of the worker."""


class Wait(NamedTuple):
    """Kind of wait: all waits of one worker for another at one place of the program."""

    worker: str
    """Name of the waiting stream or host thread."""
    awaited: str
    """Name of the stream or host thread that is waited for."""
    where: str
    """Function that calls for the wait."""


class Worker:
    """Stream or host thread, whose work items run in order.

    Args:
        name: Name in messages.
    """

    _numbers = count()

    def __init__(self, name: str) -> None:
        self.name, self.number = name, next(self._numbers)
        self.clock: Clock = {}

    def learn(self, clock: Clock) -> None:
        """Order all later work of this worker after the work in ``clock``."""
        for number, done in clock.items():
            if self.clock.get(number, 0) < done:
                self.clock[number] = done

    def work(self) -> int:
        """Count a work item, and return its number."""
        done = self.clock.get(self.number, 0) + 1
        self.clock[self.number] = done
        return done

    def knows(self, worker: int, work: int) -> bool:
        """Return whether a work item of a worker is ordered before all later work of this one."""
        return worker == self.number or self.clock.get(worker, 0) >= work


class Runtime:
    """Replacement for the functions of :mod:`torch.cuda` that the CUDA path calls, for one GPU.

    Attributes of :attr:`module` replace those of :mod:`torch.cuda` with the same names.

    Args:
        name: Name of the GPU.
        memory_bytes: Memory of the GPU.
        capability: Compute capability of the GPU.
        lost: Waits that are left out, to test the check of orderings.
    """

    def __init__(
        self,
        name: str,
        *,
        memory_bytes: int,
        capability: tuple[int, int],
        lost: frozenset[Wait] = frozenset(),
    ) -> None:
        self.compute = Stream(self, name="compute")
        self.host = Worker("host")
        self.host_waits: Counter[str] = Counter()
        """Numbers of the host's waits for the GPU, by reason and function."""
        self.waits: Counter[Wait] = Counter()
        """Numbers of all waits of streams and host threads, by kind."""
        self._lost = lost
        self._made_by: Counter[str] = Counter()
        self._current = [self.compute]
        self._streams: list[Stream] = [self.compute]
        self.used_bytes = self.used_peak_bytes = 0
        runtime, total = self, memory_bytes

        class OwnStream(Stream):
            def __init__(self, device: object = None, priority: int = 0) -> None:
                module = calling_module().rpartition(".")[2]
                runtime._made_by[module] += 1
                super().__init__(runtime, name=f"{module} {runtime._made_by[module]}")
                runtime._streams.append(self)

        class OwnEvent(Event):
            def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
                super().__init__(runtime)

        self.module = SimpleNamespace(
            Stream=OwnStream,
            Event=OwnEvent,
            stream=self.in_stream,
            current_stream=lambda device=None: self.current,
            synchronize=lambda device=None: self.synchronize("torch.cuda.synchronize"),
            set_device=lambda device: None,
            device_count=lambda: 1,
            get_device_name=lambda device=None: name,
            get_device_capability=lambda device=None: capability,
            get_device_properties=lambda device=None: SimpleNamespace(total_memory=total),
            mem_get_info=lambda device=None: (total - self.used_bytes, total),
            memory_reserved=lambda device=None: self.used_bytes,
            memory_allocated=lambda device=None: self.used_bytes,
            max_memory_reserved=lambda device=None: self.used_peak_bytes,
            max_memory_allocated=lambda device=None: self.used_peak_bytes,
            reset_peak_memory_stats=lambda device=None: self.reset_peak(),
            empty_cache=lambda: None,
            cudart=lambda: SimpleNamespace(
                cudaHostRegister=lambda *_: 0,
                cudaHostUnregister=lambda *_: 0,
                cudaGetLastError=lambda *_: 0,
            ),
        )

    @property
    def current(self) -> Stream:
        """Stream to which work is issued now."""
        return self._current[-1]

    def new_stream(self, name: str) -> Stream:
        """Return a new stream that :mod:`torch.cuda` does not create, such as a communicator's."""
        stream = Stream(self, name=name)
        self._streams.append(stream)
        return stream

    @contextmanager
    def in_stream(self, stream: Stream) -> Iterator[None]:
        """Issue work to ``stream`` within this context."""
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    @contextmanager
    def on_host(self, host: Worker) -> Iterator[None]:
        """Make `host` the host thread that issues work within this context."""
        before, self.host = self.host, host
        self._current.append(self.compute)
        try:
            yield
        finally:
            self.host = before
            self._current.pop()

    def issue(self) -> tuple[Stream, int]:
        """Count a work item of the current stream, ordered after all that the host has waited for.

        Returns:
            The stream, and the number of the work item.
        """
        stream = self.current
        stream.learn(self.host.clock)
        return stream, stream.work()

    def wait(self, worker: Worker, clock: Clock, *, awaited: str) -> None:
        """Count a wait, and order later work of ``worker`` after the work in ``clock``.

        Waits in `lost` are counted without effect.
        """
        kind = Wait(worker.name, awaited, calling_function())
        self.waits[kind] += 1
        if kind not in self._lost:
            worker.learn(clock)

    def synchronize(self, why: str) -> None:
        """Make the host wait for all streams."""
        self.count_host_wait(why)
        done: Clock = {}
        for stream in self._streams:
            for number, work in stream.clock.items():
                done[number] = max(work, done.get(number, 0))
        self.wait(self.host, done, awaited="all streams")

    def wait_for_current(self, why: str) -> None:
        """Make the host wait for all work issued to the current stream."""
        self.count_host_wait(why)
        self.wait(self.host, self.current.clock, awaited="the current stream")

    def count_host_wait(self, why: str) -> None:
        """Count a wait of the host for the GPU, with its reason and calling function."""
        self.host_waits[f"{why} in {calling_function()}"] += 1

    def reset_peak(self) -> None:
        """Restart the peak of used memory at the bytes that are in use."""
        self.used_peak_bytes = self.used_bytes

    def use(self, size_bytes: int) -> None:
        """Add ``size_bytes`` to the memory in use; a negative number frees memory."""
        self.used_bytes += size_bytes
        self.used_peak_bytes = max(self.used_peak_bytes, self.used_bytes)


class Stream(Worker):
    """Stream of the fake GPU, in place of a :class:`torch.cuda.Stream`."""

    def __init__(self, runtime: Runtime, *, name: str) -> None:
        super().__init__(name)
        self._runtime = runtime
        self.cuda_stream = self.number

    def wait_event(self, event: Event) -> None:
        """Order later work after ``event``."""
        assert event.clock is not None, f"{self.name} waits for an event that nobody recorded"
        self.learn(self._runtime.host.clock)
        self._runtime.wait(self, event.clock, awaited=event.recorded_in)

    def synchronize(self) -> None:
        """Make the host wait for all work issued to the stream."""
        self._runtime.count_host_wait("Stream.synchronize")
        self._runtime.wait(self._runtime.host, self.clock, awaited=self.name)


class Event:
    """Point of a stream, in place of a :class:`torch.cuda.Event`; elapsed times are 0."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.clock: Clock | None = None
        self.recorded_in = ""

    def record(self, stream: Stream | None = None) -> None:
        """Record all work issued to ``stream`` so far; None for the current stream."""
        stream = stream or self._runtime.current
        stream.learn(self._runtime.host.clock)
        stream.work()
        self.clock, self.recorded_in = dict(stream.clock), stream.name

    def wait(self, stream: Stream | None = None) -> None:
        """Make ``stream`` wait for the event; None for the current stream."""
        (stream or self._runtime.current).wait_event(self)

    def query(self) -> bool:
        """Return whether the event was recorded, since fake work takes no time."""
        return self.clock is not None

    def synchronize(self) -> None:
        """Make the host wait for the event."""
        assert self.clock is not None, "the host waits for an event that nobody recorded"
        self._runtime.count_host_wait("Event.synchronize")
        self._runtime.wait(self._runtime.host, self.clock, awaited=self.recorded_in)

    def elapsed_time(self, end: Any) -> float:
        """Return 0, since fake work takes no time."""
        return 0.0


def calling_function() -> str:
    """Return the name of the innermost calling function of `sppo`."""
    frame = _calling_frame()
    if frame is None:
        return "this program"
    return f"{calling_module().removeprefix('sppo.')}.{frame.f_code.co_qualname}"


def calling_module() -> str:
    """Return the name of the innermost calling module of `sppo`."""
    frame = _calling_frame()
    return "" if frame is None else str(frame.f_globals["__name__"])


def _calling_frame() -> FrameType | None:
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("sppo."):
            return frame
        frame = frame.f_back
    return None
