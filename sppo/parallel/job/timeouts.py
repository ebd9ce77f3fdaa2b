"""Times that ranks wait for each other's devices, which differ from those of hosts.

Over gloo a host waits for each message, and for no longer than ``parallel.timeout_s``. Over NCCL it
issues a whole step and then waits for its device, which waits for messages meanwhile: a wait
without progress may last as long as another rank computes. NCCL's own timeout counts from the time
at which work is issued, and ends the process without a word of who is to blame: it must come last.
"""

from __future__ import annotations

from dataclasses import dataclass

from sppo.config.base import LONGEST_TIMEOUT_S

_STEPS = 2
"""Predicted steps that a device may stand still: predictions are off, but not by that much."""


@dataclass(frozen=True, slots=True)
class DeviceTimeouts:
    """Longest waits of a rank with a device, in seconds."""

    still_s: float
    """Seconds for a device that does not get on."""
    issued_s: float
    """Seconds for work of NCCL, from the time at which it was issued."""


def device_timeouts(timeout_s: float, *, predicted_step_s: float) -> DeviceTimeouts:
    """Return the timeouts for devices.

    Args:
        timeout_s: how long a host waits for another.
        predicted_step_s: of the run.
    """
    still_s = min(max(timeout_s, _STEPS * predicted_step_s), LONGEST_TIMEOUT_S)
    return DeviceTimeouts(still_s, min(2 * still_s, LONGEST_TIMEOUT_S))
