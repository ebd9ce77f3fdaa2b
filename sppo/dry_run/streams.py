"""Streams, events and hosts of a fake GPU: what comes before what, and nothing else.

Whoever does work, a stream or a host thread, counts it, and knows of all others how much of their
work was done before (a vector clock: Mattern, "Virtual time and global states of distributed
systems", 1989). Waiting for an event is taking over what was known where it was recorded. Of two
pieces of work one comes first if the other's worker knew of it; otherwise they are unordered.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

Clock = dict[int, int]
"""Work known to be done, by worker."""


class Wait(NamedTuple):
    """Waits of one kind."""

    worker: str
    """Who waits."""
    awaited: str
    """For whose work."""
    where: str
    """Function that asks for it."""


class Moment(NamedTuple):
    """A part of a step, in which most memory is used at some point."""

    action: str
    """Item of the program, as in program text; "update" outside of it."""
    function: str
    """Function that asks for memory."""


class Worker:
    """A stream or a host thread, whose work is done in order.

    Args:
        name: for people.
    """

    _numbers = count()

    def __init__(self, name: str) -> None:
        self.name, self.number = name, next(self._numbers)
        self.clock: Clock = {}

    def learn(self, clock: Clock) -> None:
        """Begin later work only when everything in ``clock`` is done."""
        for number, done in clock.items():
            if self.clock.get(number, 0) < done:
                self.clock[number] = done

    def work(self) -> int:
        """Do a piece of work and return its number."""
        done = self.clock.get(self.number, 0) + 1
        self.clock[self.number] = done
        return done

    def knows(self, worker: int, work: int) -> bool:
        """Return whether a piece of another worker's work is done before all later work here."""
        return worker == self.number or self.clock.get(worker, 0) >= work


class Runtime:
    """Parts of :mod:`torch.cuda` that the CUDA path uses, of one fake GPU.

    Functions of :attr:`module` stand in for those of :mod:`torch.cuda` with their names.

    Args:
        name: of the GPU.
        memory_bytes: of it.
        capability: its compute capability.
        lost: waits that are left out, to see what finds that.
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
        """Counts of the host's waits for the GPU, by why and where in the program."""
        self.waits: Counter[Wait] = Counter()
        """All waits of streams and hosts."""
        self._lost = lost
        self._made_by: Counter[str] = Counter()
        self._current = [self.compute]
        self._streams: list[Stream] = [self.compute]
        self.used_bytes = self.used_peak_bytes = 0
        self.action = ""
        """Running action of the program."""
        self.peaks: dict[Moment, int] = {}
        """Most bytes used in each moment since peaks are counted."""
        runtime, total = self, memory_bytes

        class OwnStream(Stream):
            def __init__(self, device: object = None, priority: int = 0) -> None:
                _, module, *_ = calling_function().split(".")
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
    def num_streams(self) -> int:
        """Streams that were made, and the one for compute."""
        return len(self._streams)

    @property
    def current(self) -> Stream:
        """The stream that work is issued to now."""
        return self._current[-1]

    def new_stream(self, name: str) -> Stream:
        """Return a stream that no module of torch makes, such as that of a communicator."""
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
        """Let another host thread issue work within this context, to streams that it names."""
        before, self.host = self.host, host
        self._current.append(self.compute)
        try:
            yield
        finally:
            self.host = before
            self._current.pop()

    def issue(self) -> tuple[Stream, int]:
        """Count a piece of work of the current stream, behind what the host has waited for."""
        stream = self.current
        stream.learn(self.host.clock)
        return stream, stream.work()

    def wait(self, worker: Worker, clock: Clock, *, awaited: str) -> None:
        """Let a worker begin later work only when everything in ``clock`` is done."""
        kind = Wait(worker.name, awaited, calling_function())
        self.waits[kind] += 1
        if kind not in self._lost:
            worker.learn(clock)

    def synchronize(self, why: str) -> None:
        """Let the host wait for all streams."""
        self.count_host_wait(why)
        done: Clock = {}
        for stream in self._streams:
            for number, work in stream.clock.items():
                done[number] = max(work, done.get(number, 0))
        self.wait(self.host, done, awaited="all streams")

    def wait_for_current(self, why: str) -> None:
        """Let the host wait for what the current stream has been given."""
        self.count_host_wait(why)
        self.wait(self.host, self.current.clock, awaited="the current stream")

    def count_host_wait(self, why: str) -> None:
        """Count a wait of the host."""
        self.host_waits[f"{why} in {calling_function()}"] += 1

    def reset_peak(self) -> None:
        """Count the peak of used memory from here on."""
        self.used_peak_bytes = self.used_bytes
        self.peaks.clear()

    def use(self, size_bytes: int) -> None:
        """Count memory that is used from now on, or is not any more where it is negative."""
        self.used_bytes += size_bytes
        self.used_peak_bytes = max(self.used_peak_bytes, self.used_bytes)
        if size_bytes > 0:
            moment = Moment(self.action, calling_function())
            self.peaks[moment] = max(self.peaks.get(moment, 0), self.used_bytes)


class Stream(Worker):
    """A stream of the GPU, as :class:`torch.cuda.Stream`."""

    def __init__(self, runtime: Runtime, *, name: str) -> None:
        super().__init__(name)
        self._runtime = runtime
        self.cuda_stream = self.number

    def wait_event(self, event: Event) -> None:
        """Begin later work only when ``event`` is reached."""
        assert event.clock is not None, f"{self.name} waits for an event that nobody recorded"
        self.learn(self._runtime.host.clock)
        self._runtime.wait(self, event.clock, awaited=event.recorded_in)

    def wait_stream(self, stream: Stream) -> None:
        """Begin later work only when what ``stream`` has been given is done."""
        self.learn(self._runtime.host.clock)
        self._runtime.wait(self, stream.clock, awaited=stream.name)

    def synchronize(self) -> None:
        """Let the host wait until what the stream has been given is done."""
        self._runtime.count_host_wait("Stream.synchronize")
        self._runtime.wait(self._runtime.host, self.clock, awaited=self.name)


class Event:
    """A point of a stream, as :class:`torch.cuda.Event`; its times are all zero."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.clock: Clock | None = None
        self.recorded_in = ""

    def record(self, stream: Stream | None = None) -> None:
        """Stand for what ``stream`` has been given so far."""
        stream = stream or self._runtime.current
        stream.learn(self._runtime.host.clock)
        stream.work()
        self.clock, self.recorded_in = dict(stream.clock), stream.name

    def wait(self, stream: Stream | None = None) -> None:
        """Make a stream wait for it."""
        (stream or self._runtime.current).wait_event(self)

    def query(self) -> bool:
        """Return True: nothing takes time."""
        return self.clock is not None

    def synchronize(self) -> None:
        """Let the host wait for it."""
        assert self.clock is not None, "the host waits for an event that nobody recorded"
        self._runtime.count_host_wait("Event.synchronize")
        self._runtime.wait(self._runtime.host, self.clock, awaited=self.recorded_in)

    def elapsed_time(self, end: Any) -> float:
        """Return 0."""
        return 0.0


def calling_function() -> str:
    """Name the innermost function of this package that is no part of a dry run."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("sppo.") and not module.startswith("sppo.dry_run."):
            return f"{module.removeprefix('sppo.')}.{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "this program"
