"""Memory of this process and of the machine it runs on.

On a CPU the device's memory is RAM, so a step's peak is the peak of the resident set. Linux can
reset that peak; elsewhere it is the peak since the process started.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

import psutil

from sppo.units import MIB

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")

_M_MMAP_THRESHOLD = -3  # of <malloc.h>
_RETURNED_BLOCK_BYTES = MIB


def reset_peak() -> None:
    """Start a new peak from the present resident set, where the system allows it."""
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return


def peak_resident_bytes() -> int:
    """Most resident memory since :func:`reset_peak`."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def return_freed_tensors() -> bool:
    """Have glibc give every freed block of 1 MiB or more back to the system at once.

    By default it keeps blocks of up to 32 MiB in its heap, where saved activations, which live
    long, and temporaries, which do not, end up between each other: the resident set grows well
    past what is alive. Says whether the C library took the setting; other libraries have none.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _RETURNED_BLOCK_BYTES))


def resident_bytes() -> int:
    """Resident memory now."""
    return int(psutil.Process().memory_info().rss)


def available_bytes() -> int:
    """Memory a process may still take: the machine's, or its control groups' if that is less."""
    rooms = [int(psutil.virtual_memory().available)]
    rooms += [room for group in _control_groups() if (room := _room_in(group)) is not None]
    return max(0, min(rooms))


def _control_groups() -> list[Path]:
    """This process's group (version 2) and all above it; a limit of any of them holds."""
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        lines = []
    name = next((line[3:] for line in lines if line.startswith("0::")), "/")
    own = _CGROUPS / name.lstrip("/")
    above = [group for group in own.parents if group.is_relative_to(_CGROUPS)]
    return [own, *above]


def _room_in(group: Path) -> int | None:
    """What ``group`` may still take; files it has cached make way and do not count."""
    try:
        limit = int((group / "memory.max").read_text())  # "max" where there is no limit
        current = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = int(stat["active_file"]) + int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):
        return None
    return limit - (current - cached)
