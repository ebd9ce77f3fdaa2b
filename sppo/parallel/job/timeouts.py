"""Timeouts for ranks that wait for devices, which differ from those of hosts.

Over gloo, a host waits for each message, at most ``parallel.timeout_s``. Over NCCL, a host issues a
whole step and then waits for its device, which in turn waits for messages: the device may make no
progress for as long as another rank computes. NCCL's own timeout counts from the time at which work
is issued, and ends the process without naming the failed rank, so it must be the longest.
"""

from __future__ import annotations

from sppo.config.base import LONGEST_TIMEOUT_S

_STEPS = 2
"""Predicted step times that a device may go without progress; predictions are less wrong."""


def stall_timeout(timeout_s: float, *, predicted_step_s: float) -> float:
    """Return the longest time in seconds without progress of a device.

    Args:
        timeout_s: Longest time in seconds that a host waits for another host.
        predicted_step_s: Predicted step time of the run in seconds.
    """
    return min(max(timeout_s, _STEPS * predicted_step_s), LONGEST_TIMEOUT_S)


def issued_timeout(stall_timeout_s: float) -> float:
    """Return the longest time in seconds from issue to completion of NCCL work."""
    return min(2 * stall_timeout_s, LONGEST_TIMEOUT_S)
