"""Limits of memory that control groups set for this process, as containers do.

Two versions of control groups are in use. The limits of all groups above the process apply.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT_BYTES = 1 << 60
"""Version 1 states the largest number where there is no limit."""
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}
"""Files of the limit and of the used bytes, and prefix of the statistics, by version."""


def memory_limits(
    *, membership: Path = _MEMBERSHIP, cgroups: Path = _CGROUPS
) -> Iterator[tuple[int, int | None]]:
    """Yield the limit of each group above this process that limits memory, and the bytes left now.

    Bytes left include those of cached files, and are None if they are not known. A container may
    see only the group at the top.

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
            top, version = cgroups, 2
        elif "memory" in controllers.split(","):
            top, version = cgroups / "memory", 1
        else:
            continue
        own = top / name.lstrip("/")
        for directory in (own, *(above for above in own.parents if above.is_relative_to(top))):
            try:
                limit = int((directory / _FILES[version][0]).read_text())  # or "max": no limit
            except (OSError, ValueError):
                continue
            if 0 < limit < _NO_LIMIT_BYTES:
                yield limit, _room_bytes(directory, limit, version=version)


def _room_bytes(directory: Path, limit_bytes: int, *, version: int) -> int | None:
    """Return the bytes left in a group, those of cached files included; None if unknown."""
    _, used, prefix = _FILES[version]
    try:
        current = int((directory / used).read_text())
        lines = (directory / "memory.stat").read_text().splitlines()
        statistics = dict(line.split() for line in lines)
        files = (int(statistics[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
        return limit_bytes - current + sum(files)
    except (OSError, ValueError, KeyError):
        return None
