"""Current and peak memory of this process.

For a CPU device, the peak memory of a step is the peak of the resident set. Linux can reset this
peak; on other systems it is the peak since the process started.
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
    """Reset the peak to the current resident set, if the system supports it."""
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return


def peak_resident_bytes() -> int:
    """Return the peak resident memory in bytes since :func:`reset_peak`, or the process's start."""
    peak = status_bytes("VmHWM", status=_STATUS)
    if peak is not None:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def file_bytes() -> int:
    """Return the resident pages of files in bytes, those of libraries above all; 0 if unknown.

    The system shares them among processes, and drops them if memory is short.
    """
    return status_bytes("RssFile", status=_STATUS) or 0


def resident_bytes() -> int:
    """Return the current resident memory in bytes."""
    return int(psutil.Process().memory_info().rss)
