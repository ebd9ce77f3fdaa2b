"""Check that all conflicting accesses of the same memory by streams and host are ordered.

Two accesses of the same bytes, at least one of which writes, must be ordered by events, waits and
streams. The caching allocator gives freed memory to the next request of its stream at once. So
freed memory counts as written by the stream that allocated it, and newly allocated memory as
written by its allocating stream: other streams must use it after the work issued to that stream
before.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from tests.dry_run.streams import Worker


@dataclass(frozen=True, slots=True)
class Access:
    """Access of a range of bytes of a storage by one work item of a stream or host thread."""

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
    """Recorded accesses of storages, and counts of unordered pairs."""

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
        """Record an access of the bytes ``[begin, end)`` of a storage, and check it.

        Args:
            key: Key of the storage.
            bytes_of: Range of bytes (begin, end).
            worker: Stream or host thread that does the work.
            work: Number of the work item of `worker`.
            writes: Whether the access writes.
            what: Name of the work in messages.
        """
        access = Access(worker, work, *bytes_of, writes, what)
        self.num_accesses += 1
        kept = []
        for earlier in self._accesses[key]:
            apart = earlier.end <= access.begin or access.end <= earlier.begin
            ordered = worker.knows(earlier.worker.number, earlier.work)
            if not apart and not ordered and (writes or earlier.writes):
                self._note(earlier, access)
            # Work ordered after this access is also ordered after the accesses that it replaces.
            covered = access.begin <= earlier.begin and earlier.end <= access.end
            if not (covered and ordered and (writes or not earlier.writes)):
                kept.append(earlier)
        self._accesses[key] = [*kept, access]

    def handed_out(self, key: int, size_bytes: int, worker: Worker) -> None:
        """Record a new storage, in whose memory ``worker`` may still use a freed storage."""
        done = worker.clock.get(worker.number, 0)
        self._accesses[key] = [Access(worker, done, 0, size_bytes, True, "memory handed out")]

    def freed(self, key: int, worker: Worker | None) -> None:
        """Record that a storage is freed, for the next request of the allocating stream ``worker``.

        Host memory has no ``worker`` and is not checked: torch keeps page-locked memory until
        copies have read it, and copies pageable memory first.
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
