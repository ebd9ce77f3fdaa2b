"""Memory of this process.

On a CPU the device's memory is RAM, so a step's peak is the peak of the resident set. Linux can
reset that peak; elsewhere it is the peak since the process started.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil

from sppo.kernels.native.machine_memory import status_bytes

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def reset_peak() -> None:
    """Start a new peak from the present resident set, where the system allows it."""
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return


def peak_resident_bytes() -> int:
    """Most resident memory since :func:`reset_peak`."""
    peak = status_bytes("VmHWM", status=_STATUS)
    if peak is not None:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def private_bytes() -> int:
    """Resident memory now that no other process can share; all of it where nothing tells."""
    private = status_bytes("RssAnon", status=_STATUS)
    return resident_bytes() if private is None else private


def resident_bytes() -> int:
    """Resident memory now."""
    return int(psutil.Process().memory_info().rss)
