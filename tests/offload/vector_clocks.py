"""Happens-before by vector clocks, and a checker of every access to shared memory.

Each actor (compute, and every queue) counts its own operations. An event carries the counts that
its actor knew when the event was reached, and an actor that waits for the event learns these
counts. Two accesses to one place, at least one of them a write, must be ordered by known counts; an
order that happened by chance does not suffice. A missing ordering is therefore found under every
schedule, as long as both accesses are made.
"""

from collections import defaultdict


class RaceError(AssertionError):
    """Two accesses that nothing orders."""


class Actor:
    """Something that runs one operation after another."""

    def __init__(self, name):
        self.name = name
        self.clock = {}

    def learn(self, clock):
        for name, count in clock.items():
            self.clock[name] = max(self.clock.get(name, 0), count)

    def tick(self):
        """Begin an operation."""
        self.clock[self.name] = self.clock.get(self.name, 0) + 1

    def now(self):
        return dict(self.clock)


class AccessChecker:
    """Knows the last write of every place and the reads since."""

    def __init__(self):
        self._write = {}
        self._reads = defaultdict(dict)

    def read(self, actor, place):
        if place not in self._write:
            raise RaceError(f"{actor.name} reads {place}, and nothing was written there before")
        self._ordered(actor, place, *self._write[place], f"{actor.name} reads", "written")
        self._reads[place][actor.name] = actor.clock[actor.name]

    def write(self, actor, place):
        if place in self._write:
            self._ordered(actor, place, *self._write[place], f"{actor.name} writes", "written")
        for reader, count in self._reads.pop(place, {}).items():
            self._ordered(actor, place, reader, count, f"{actor.name} writes", "read")
        self._write[place] = actor.name, actor.clock[actor.name]

    def _ordered(self, actor, place, other, count, does, done):
        if actor.clock.get(other, 0) < count:
            raise RaceError(f"{does} {place}, {done} by {other}, and nothing orders the two")
