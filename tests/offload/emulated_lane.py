"""Lane whose copies run when a scheduler says so, on memory with checked accesses.

Compute runs at once, but it is a separate actor, as on an accelerator: only an event orders issued
compute before a copy. Copies out and back run in order, as streams do; transfers of the disk run in
any order, as threads do.
"""

import itertools
import random
from bisect import bisect_right

import torch

from sppo.activations.block_layout import BLOCK_ALIGNMENT_BYTES
from sppo.offload.copy_report import CopyReport
from tests.offload.vector_clocks import AccessChecker, Actor

STREAMS, DISK = ("out", "back"), ("write", "read")
POISON = 0xFF


class Eager:
    """Every copy at once."""

    def enqueued(self, lane, copy):
        lane.force(copy)


class Lazy:
    """No copy before something waits for it: the most hostile of all legal orders."""

    def enqueued(self, lane, copy):
        pass


class Random:
    """Copies at random moments, from random queues."""

    def __init__(self, seed):
        self._random = random.Random(seed)

    def enqueued(self, lane, copy):
        while self._random.random() < 0.7:
            lane.run_any(self._random)


SCHEDULERS = {
    "eager": Eager,
    "lazy": Lazy,
    **{f"random {seed}": lambda seed=seed: Random(seed) for seed in range(3)},
}


class Mark:
    """A moment in compute."""

    queue = "compute"

    def __init__(self, clock):
        self.clock = clock

    def done(self):
        return True


class QueuedCopy:
    def __init__(self, queue, actor, after, accesses, work, copies):
        self.queue, self.actor, self.after = queue, actor, after
        self.accesses, self.work, self.copies = accesses, work, copies
        self.clock = None

    def done(self):
        return self.clock is not None


class EmulatedLane:
    """:class:`sppo.offload.lane.Lane` for tests, which is its own file.

    Args:
        scheduler: When copies run.
        reads_to_device: Whether the disk is read straight into device memory.
        ignored: A wait, as (who waits, for whom), that is dropped wherever it is asked for.
        fail: Called with the name of every copy that runs, to raise an error of a disk.
    """

    def __init__(self, scheduler, *, reads_to_device=False, ignored=None, fail=None):
        self.reads_to_device = reads_to_device
        self._scheduler, self._ignored, self._fail = scheduler, ignored, fail
        self._checker = AccessChecker()
        self._compute = Actor("compute")
        self._ended = Actor("all that has ended")
        self._streams = {name: Actor(name) for name in STREAMS}
        self._pending = {name: [] for name in (*STREAMS, *DISK)}
        self._memory = {}
        self.file, self._bytes = self, torch.empty(0, dtype=torch.uint8)
        self._serial = itertools.count()
        self._sources = {}
        self.seen = set()
        self.error = None

    def device_memory(self, size_bytes):
        # Views of one mapping begin where pages do.
        memory = torch.full((size_bytes + BLOCK_ALIGNMENT_BYTES,), POISON, dtype=torch.uint8)
        begin = -memory.data_ptr() % BLOCK_ALIGNMENT_BYTES
        aligned = memory[begin : begin + size_bytes]
        self._memory[aligned.data_ptr()] = aligned
        return aligned

    def host_memory(self, name, size_bytes):
        return self.device_memory(size_bytes)

    def open(self, directory, size_bytes):
        self._bytes = torch.full((size_bytes,), POISON, dtype=torch.uint8)

    def computed(self, tensors):
        self._compute.tick()
        for tensor in tensors:
            for place in self._places(tensor):
                self._access("write", self._compute, place)
        return Mark(self._compute.now())

    def out(self, copies, *, after):
        return self._copy("out", copies, after)

    def back(self, copies, *, after):
        return self._copy("back", copies, after)

    def write(self, offset_bytes, data, *, after):
        data = torch.from_numpy(data)
        size = data.numel()

        def work():
            self._bytes[offset_bytes : offset_bytes + size] = data
            data.fill_(POISON)

        accesses = [
            *(("read", place) for place in self._places(data)),
            *(("write", place) for place in _blocks("file", offset_bytes, size)),
            *(("write", place) for place in self._places(data)),
        ]
        return self._enqueue("write", after, accesses, work)

    def read(self, offset_bytes, data, *, after):
        data = torch.from_numpy(data)
        size = data.numel()

        def work():
            data.copy_(self._bytes[offset_bytes : offset_bytes + size])

        accesses = [
            *(("read", place) for place in _blocks("file", offset_bytes, size)),
            *(("write", place) for place in self._places(data)),
        ]
        return self._enqueue("read", after, accesses, work, [(data, None)])

    def before_compute(self, event):
        kind = ("compute", event.queue)
        self.seen.add(kind)
        if kind != self._ignored:
            self.force(event)
            self.check()
            self._compute.learn(event.clock)
        self._compute.tick()
        for target, source in event.copies:
            if event.queue != "out":
                for place in self._places(target):
                    self._access("read", self._compute, place)
                continue
            for place in self._places(source):  # compute uses the memory for something else
                self._access("write", self._compute, place)
            source.view(-1).view(torch.uint8).fill_(POISON)
            del self._sources[id(source)]

    def check(self):
        if self.error is not None:
            raise self.error

    def settle(self):
        assert not any(self._pending.values()), "a step waits for all its copies"
        self._compute.learn(self._ended.clock)
        for actor in self._streams.values():
            actor.learn(self._compute.clock)

    def take_times(self):
        return CopyReport()

    def close(self):
        for pending in self._pending.values():
            pending.clear()
        return True

    def force(self, copy):
        """Run it, and first what comes before it in its stream or by an event."""
        pending = self._pending[copy.queue]
        while not copy.done():
            first = pending[0] if copy.queue in STREAMS else copy
            for event in first.after:
                if not self._is_ignored(first, event) and isinstance(event, QueuedCopy):
                    self.force(event)
            if not first.done():
                self._run(first)

    def run_any(self, chosen):
        """Run a copy of a random queue if all it waits for has run."""
        name = chosen.choice([*self._pending])
        pending = self._pending[name]
        if not pending:
            return
        copy = pending[0] if name in STREAMS else chosen.choice(pending)
        if all(event.done() for event in copy.after if not self._is_ignored(copy, event)):
            self._run(copy)

    def _copy(self, queue, copies, after):
        def work():
            for target, source in copies:
                target.copy_(source)
                if queue == "back":
                    source.fill_(POISON)

        accesses = [("read", place) for _, source in copies for place in self._places(source)]
        accesses += [("write", place) for target, _ in copies for place in self._places(target)]
        if queue == "back":
            accesses += [("write", place) for _, source in copies for place in self._places(source)]
        return self._enqueue(queue, after, accesses, work, copies)

    def _enqueue(self, queue, after, accesses, work, copies=()):
        self.seen.update((queue, event.queue) for event in after)
        actor = self._streams.get(queue) or Actor(f"{queue} {next(self._serial)}")
        copy = QueuedCopy(queue, actor, list(after), accesses, work, copies)
        self._pending[queue].append(copy)
        self._scheduler.enqueued(self, copy)
        return copy

    def _run(self, copy):
        self._pending[copy.queue].remove(copy)
        for event in copy.after:
            if not self._is_ignored(copy, event):
                copy.actor.learn(event.clock)
        copy.actor.tick()
        if self._fail is not None:
            try:
                self._fail(copy.queue)
            except OSError as error:
                self.error = self.error or error
        for kind, place in copy.accesses:
            self._access(kind, copy.actor, place)
        copy.work()
        copy.clock = copy.actor.now()
        self._ended.learn(copy.clock)

    def _is_ignored(self, copy, event):
        return (copy.queue, event.queue) == self._ignored

    def _places(self, tensor):
        """Blocks of this lane's memory that a tensor touches, or the tensor of someone else."""
        address, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        begins = sorted(self._memory)
        index = bisect_right(begins, address) - 1
        if index >= 0 and address + size <= begins[index] + self._memory[begins[index]].numel():
            return _blocks(begins[index], address - begins[index], size)
        # The tensor itself, so that its address is not used again.
        name, _ = self._sources.setdefault(id(tensor), (next(self._serial), tensor))
        return [("source", name)]

    def _access(self, kind, actor, place):
        getattr(self._checker, kind)(actor, place)


def _blocks(where, offset_bytes, size_bytes):
    first = offset_bytes // BLOCK_ALIGNMENT_BYTES
    last = -(-(offset_bytes + size_bytes) // BLOCK_ALIGNMENT_BYTES)
    return [(where, block) for block in range(first, last)]
