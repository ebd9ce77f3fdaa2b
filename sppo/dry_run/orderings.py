"""Proof that all work on the same memory is ordered, over every access of streams and host.

Two accesses of the same bytes, at least one of which writes, must be ordered by events, waits and
streams. The caching allocator gives memory that is freed to the next request of the stream it came
from, at once. So memory that is freed counts as written by that stream, and memory that is handed
out as written by the stream that asked: other streams use it behind what that one had been given.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from sppo.dry_run.streams import Worker


@dataclass(frozen=True, slots=True)
class Access:
    """One piece of work on some bytes of a storage."""

    worker: Worker
    work: int
    begin: int
    end: int
    writes: bool
    what: str


@dataclass(frozen=True, slots=True)
class Unordered:
    """Two accesses of the same bytes that may happen in either order, or at once."""

    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.second} is not ordered after {self.first}"


class OrderingCheck:
    """Accesses of storages so far, and which of them were unordered."""

    def __init__(self) -> None:
        self._accesses: defaultdict[int, list[Access]] = defaultdict(list)
        self.unordered: Counter[Unordered] = Counter()
        self.num_accesses = 0

    def touch(
        self,
        key: int,
        bytes_of: tuple[int, int],
        *,
        worker: Worker,
        work: int,
        writes: bool,
        what: str,
    ) -> None:
        """Take in an access of the bytes ``[begin, end)`` of a storage."""
        access = Access(worker, work, *bytes_of, writes, what)
        self.num_accesses += 1
        kept = []
        for earlier in self._accesses[key]:
            apart = earlier.end <= access.begin or access.end <= earlier.begin
            ordered = worker.knows(earlier.worker.number, earlier.work)
            if not apart and not ordered and (writes or earlier.writes):
                self._note(earlier, access)
            # Whatever is ordered after this access will be ordered after what it replaces.
            covered = access.begin <= earlier.begin and earlier.end <= access.end
            if not (covered and ordered and (writes or not earlier.writes)):
                kept.append(earlier)
        self._accesses[key] = [*kept, access]

    def handed_out(self, key: int, size_bytes: int, worker: Worker) -> None:
        """Take in that a new storage may lie where ``worker`` still works on an older one."""
        done = worker.clock.get(worker.number, 0)
        self._accesses[key] = [Access(worker, done, 0, size_bytes, True, "memory handed out")]

    def freed(self, key: int, worker: Worker | None) -> None:
        """Take in that a storage is free for the next request of ``worker``.

        Host memory has none: torch keeps what is page-locked until copies have read it, and of
        other memory they make a copy first.
        """
        for earlier in self._accesses.pop(key, ()):
            if worker is not None and not worker.knows(earlier.worker.number, earlier.work):
                whole = Access(worker, 0, 0, 0, True, "memory used again")
                self._note(earlier, whole)

    def _note(self, first: Access, second: Access) -> None:
        self.unordered[Unordered(_described(first), _described(second))] += 1


def _described(access: Access) -> str:
    how = "writes" if access.writes else "reads"
    return f"{access.what} on {access.worker.name} ({how})"
