"""Copy queues whose copies run when a scheduler says so, on memory with checked accesses.

Compute runs at once, but it is a separate actor, as on an accelerator: only an event orders issued
compute before a copy.
"""

import itertools
import random
from collections import deque

import torch

from sppo.activations.activation_layout import BLOCK_ALIGNMENT_BYTES
from sppo.offload.copy_report import CopyReport
from sppo.offload.queues.copy_queues import Ordering
from tests.offload.vector_clocks import AccessChecker, Actor

QUEUES = ("copy out", "write", "read", "copy back")
POISON = 0xFF


class Eager:
    """Every copy at once."""

    def enqueued(self, queues, copy):
        queues.force(copy)


class Lazy:
    """No copy before something waits for it: the most hostile of all legal orders."""

    def enqueued(self, queues, copy):
        pass


class Random:
    """Copies at random moments, from random queues."""

    def __init__(self, seed):
        self._random = random.Random(seed)

    def enqueued(self, queues, copy):
        while self._random.random() < 0.7:
            queues.run_head(self._random.choice(QUEUES))


SCHEDULERS = {
    "eager": Eager,
    "lazy": Lazy,
    **{f"random {seed}": lambda seed=seed: Random(seed) for seed in range(3)},
}


class Mark:
    """A moment in compute."""

    def __init__(self, clock):
        self.clock = clock

    def done(self):
        return True


class QueuedCopy:
    def __init__(self, queue, after, accesses, work, sources=()):
        self.queue, self.after, self.accesses, self.work = queue, after, accesses, work
        self.sources = sources
        self.clock = None

    def done(self):
        return self.clock is not None


class EmulatedQueues:
    """:class:`sppo.offload.queues.copy_queues.CopyQueues` for tests.

    Args:
        scheduler: when copies run.
        ignored: an ordering that is dropped wherever it is asked for.
        checked: whether unordered accesses are errors.
        fail: called with the name of every copy that runs, to raise an error of a disk.
    """

    def __init__(self, scheduler, *, ignored=None, checked=True, fail=None):
        self._scheduler, self._ignored, self._fail = scheduler, ignored, fail
        self._checker = AccessChecker() if checked else None
        self._compute = Actor("compute")
        self._actors = {queue: Actor(queue) for queue in QUEUES}
        self._pending = {queue: deque() for queue in QUEUES}
        self._file = torch.empty(0, dtype=torch.uint8)
        self._serial = itertools.count()
        self._names = {}
        self.seen = set()
        self.error = None
        self.closed = False

    def host_memory(self, size_bytes):
        return torch.full((size_bytes,), POISON, dtype=torch.uint8)

    device_memory = host_memory

    def open_file(self, directory, size_bytes):
        self._file = self.host_memory(size_bytes)

    def produced(self, sources):
        self._compute.tick()
        for source in sources:
            self._names[id(source)] = ("source", next(self._serial))
            self._access("write", self._compute, self._names[id(source)])
        return Mark(self._compute.now())

    def copy_out(self, host, placed, *, after):
        sources = [(self._names.pop(id(source)), source) for _, source in placed]

        def work():
            for offset, source in placed:
                data = source.view(-1).view(torch.uint8)
                host.data[offset : offset + data.numel()] = data

        accesses = [("read", name) for name, _ in sources] + [("write", _place(host))]
        return self._enqueue("copy out", after, accesses, work, sources)

    def reusable(self, copied):
        self._compute_after(Ordering.OUT_BEFORE_SOURCE_REUSE, copied)
        for name, source in copied.sources:
            self._access("write", self._compute, name)
            source.view(-1).view(torch.uint8).fill_(POISON)

    def write(self, offset_bytes, host, size_bytes, *, after):
        def work():
            self._file[offset_bytes : offset_bytes + size_bytes] = host.data[:size_bytes]
            host.data.fill_(POISON)

        accesses = [("read", _place(host)), *_blocks("write", offset_bytes, size_bytes)]
        return self._enqueue("write", after, [*accesses, ("write", _place(host))], work)

    def read(self, host, offset_bytes, size_bytes, *, after):
        def work():
            host.data[:size_bytes] = self._file[offset_bytes : offset_bytes + size_bytes]

        accesses = [*_blocks("read", offset_bytes, size_bytes), ("write", _place(host))]
        return self._enqueue("read", after, accesses, work)

    def copy_back(self, ring, host, size_bytes, *, after):
        def work():
            ring.data[:size_bytes] = host.data[:size_bytes]
            host.data[:size_bytes] = POISON

        accesses = [("read", _place(host)), ("write", _place(ring)), ("write", _place(host))]
        return self._enqueue("copy back", after, accesses, work)

    def use(self, ring, back):
        self._compute_after(Ordering.BACK_BEFORE_USE, back)
        self._access("read", self._compute, _place(ring))

    def used(self, ring):
        self._compute.tick()
        self._access("read", self._compute, _place(ring))
        self._access("write", self._compute, _place(ring))
        ring.data.fill_(POISON)
        return Mark(self._compute.now())

    def check(self):
        if self.error is not None:
            raise self.error

    def abort(self):
        for pending in self._pending.values():
            pending.clear()
        self.error = None
        for actor in self._actors.values():
            self._compute.learn(actor.clock)  # what was discarded has ended
        for actor in self._actors.values():
            actor.learn(self._compute.clock)
        return True

    def take_times(self):
        return CopyReport()

    def close(self):
        self.closed = True

    def force(self, copy):
        """Run it, and first what comes before it in its queue or by an event."""
        while not copy.done():
            head = self._pending[copy.queue][0]
            for ordering, event in head.after:
                if ordering is not self._ignored and isinstance(event, QueuedCopy):
                    self.force(event)
            if not head.done():
                self._run(head)

    def run_head(self, queue):
        """Run the first of a queue if all it waits for has run."""
        if not self._pending[queue]:
            return
        head = self._pending[queue][0]
        if all(event.done() for ordering, event in head.after if ordering is not self._ignored):
            self._run(head)

    def _enqueue(self, queue, after, accesses, work, sources=()):
        self.seen.update(ordering for ordering, _ in after)
        copy = QueuedCopy(queue, list(after), accesses, work, sources)
        self._pending[queue].append(copy)
        self._scheduler.enqueued(self, copy)
        return copy

    def _run(self, copy):
        assert self._pending[copy.queue].popleft() is copy
        actor = self._actors[copy.queue]
        for ordering, event in copy.after:
            if ordering is not self._ignored:
                actor.learn(event.clock)
        actor.tick()
        if self._fail is not None:
            try:
                self._fail(copy.queue)
            except OSError as error:
                self.error = self.error or error
        for kind, place in copy.accesses:
            self._access(kind, actor, place)
        copy.work()
        copy.clock = actor.now()

    def _compute_after(self, ordering, copy):
        self.seen.add(ordering)
        if ordering is not self._ignored:
            self.force(copy)
            self.check()
            self._compute.learn(copy.clock)
        self._compute.tick()

    def _access(self, kind, actor, place):
        if self._checker is not None:
            getattr(self._checker, kind)(actor, place)


def _place(region):
    return region.place, region.index


def _blocks(kind, offset_bytes, size_bytes):
    first, last = offset_bytes, offset_bytes + size_bytes
    return [(kind, ("file", block)) for block in range(first, last, BLOCK_ALIGNMENT_BYTES)]
