"""Limits of memory that control groups set for this process, as containers do.

Two versions of control groups are in use. The limits of all groups above the process apply.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT_BYTES = 1 << 60
"""Version 1 states the largest number where there is no limit."""
_USED = {1: ("memory.usage_in_bytes", "total_"), 2: ("memory.current", "")}
"""File of the used bytes, and prefix of the statistics, by version."""


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """Control group that limits memory.

    Attributes:
        directory: Directory of the group's files.
        version: Version of control groups, 1 or 2.
        limit_bytes: Memory that all processes of the group together may have.
    """

    directory: Path
    version: int
    limit_bytes: int

    def room_bytes(self) -> int | None:
        """Return the bytes left now, those of cached files included; None if that is not known."""
        used, prefix = _USED[self.version]
        try:
            current = int((self.directory / used).read_text())
            lines = (self.directory / "memory.stat").read_text().splitlines()
            statistics = dict(line.split() for line in lines)
            files = (int(statistics[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
            return self.limit_bytes - current + sum(files)
        except (OSError, ValueError, KeyError):
            return None


def memory_groups(
    *, membership: Path = _MEMBERSHIP, cgroups: Path = _CGROUPS
) -> Iterator[MemoryGroup]:
    """Yield the groups above this process that limit memory; a container may see only the top one.

    Args:
        membership: File that names the control groups of this process.
        cgroups: Directory in which control groups are mounted.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if not controllers:
            top, version, file = cgroups, 2, "memory.max"
        elif "memory" in controllers.split(","):
            top, version, file = cgroups / "memory", 1, "memory.limit_in_bytes"
        else:
            continue
        own = top / name.lstrip("/")
        for directory in (own, *(above for above in own.parents if above.is_relative_to(top))):
            try:
                limit = int((directory / file).read_text())  # "max" where there is no limit
            except (OSError, ValueError):
                continue
            if 0 < limit < _NO_LIMIT_BYTES:
                yield MemoryGroup(directory, version, limit)
