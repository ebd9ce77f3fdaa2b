"""Available memory: limits of the machine, of control groups and of the process.

``ulimit -v`` and ``-d`` limit the address space of one process.
"""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from sppo.hardware.control_groups import memory_limits
from sppo.units import GIB, MIB, format_bytes

LIBRARY_BYTES = 240 * MIB
"""Memory of the libraries of a training process; measured with torch 2.13."""
LIBRARY_ADDRESS_BYTES = GIB
"""Address space of the libraries of a training process and their threads, in bytes."""

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """Bytes that this process may still allocate under each limit; None for a limit not set."""

    machine_bytes: int
    control_group_bytes: int | None = None
    address_bytes: int | None = None

    @property
    def least_bytes(self) -> int:
        """Bytes that the process may allocate under all limits together."""
        return self.share_bytes(1)

    def share_bytes(self, processes: int) -> int:
        """Return the bytes that each of ``processes`` may allocate.

        The processes divide the memory equally; the limit of addresses applies to each process.
        """
        rooms = (self.machine_bytes, self.control_group_bytes)
        each = min(room for room in rooms if room is not None) // processes
        return max(0, each if self.address_bytes is None else min(each, self.address_bytes))

    def __str__(self) -> str:
        group = self.control_group_bytes
        parts = [
            f"{format_bytes(self.machine_bytes)} available on the machine",
            "no control group limit"
            if group is None
            else f"{format_bytes(max(0, group))} left in the control group",
        ]
        if self.address_bytes is not None:
            parts.append(f"{format_bytes(self.address_bytes)} of addresses left by ulimit")
        return ", ".join(parts)


def memory_room() -> MemoryRoom:
    """Return the memory that is available now."""
    return MemoryRoom(
        machine_bytes=int(psutil.virtual_memory().available),
        control_group_bytes=control_group_room(),
        address_bytes=address_room(),
    )


def check_room_for_libraries(*, processes: int = 1) -> None:
    """Raise MemoryError if ``processes`` training processes cannot load their libraries.

    Called before torch is imported: beyond a limit the system kills a process without a message.
    """
    room = memory_room()
    needed = processes * LIBRARY_BYTES
    if replace(room, address_bytes=None).least_bytes < needed:
        many = f"training in {processes} processes" if processes > 1 else "training"
        raise MemoryError(
            f"{many} needs {format_bytes(needed)} for libraries alone, and there is less: "
            f"{room}; raise the limit, or end other programs"
        )
    if room.address_bytes is not None and room.address_bytes < LIBRARY_ADDRESS_BYTES:
        raise MemoryError(
            f"the libraries of a training process take {format_bytes(LIBRARY_ADDRESS_BYTES)} of "
            f"addresses, and ulimit -v (or -d) leaves {format_bytes(room.address_bytes)}: raise it"
        )


def address_room(*, status: Path = _STATUS) -> int | None:
    """Return the bytes that ``ulimit -v`` and ``ulimit -d`` leave this process; None if unlimited.

    Args:
        status: Path of the process's status file.
    """
    rooms = []
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            rooms.append(max(0, soft - (status_bytes(name, status=status) or 0)))
    return min(rooms, default=None)


def status_bytes(name: str, *, status: Path = _STATUS) -> int | None:
    """Return a figure of this process from ``/proc/self/status`` in bytes; None if not available.

    Args:
        name: Name of the figure, e.g. ``VmHWM``.
        status: Path of the process's status file.
    """
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
    except OSError:
        return None
    return 1024 * int(found[1]) if found else None


def control_group_room() -> int | None:
    """Return the least bytes left in any of this process's control groups; None without a limit."""
    rooms = (room for _, room in memory_limits())
    return min((room for room in rooms if room is not None), default=None)
