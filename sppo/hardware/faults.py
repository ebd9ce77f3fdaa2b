"""Stops of a job, the interval between its checkpoints, and the time that both take.

Stops are independent of each other: the time from one to the next is distributed exponentially.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, sqrt
from typing import Literal

from sppo.config.run import HardwareConfig

_HOUR_S, _DAY_S = 3600.0, 86400.0
DEVICE_MEAN_TIME_TO_FAILURE_S = 54 * _DAY_S * 16384 / 419
"""Mean seconds from one unplanned stop to the next that one device causes: 419 stops in 54 days on
16 384 GPUs (The Llama 3 Herd of Models, arXiv:2407.21783)."""
OTHER_STOPS_PER_S = 1 / _DAY_S
"""Stops of a job that do not depend on its devices, assumed: time limits of queues, pre-emption,
people."""
RESTART_S = 15 * 60.0
"""Seconds from a stop to the next step: the restart of a large job that vendors of fault tolerance
assume (clockwork.io/workload-failover)."""
FIRST_SAVE_S = 600.0
"""Seconds of training before the first automatic save, as long as those of a save are not known."""


def mean_time_between_stops_s(
    hardware: Literal["auto"] | HardwareConfig, *, num_devices: int
) -> float:
    """Return the mean seconds from one stop of a job to the next.

    Args:
        hardware: Value of the run file's ``hardware``, whose mean time to failure replaces the
            published one and all other stops.
        num_devices: Devices of the job.
    """
    given_s = None if hardware == "auto" else hardware.mean_time_to_failure
    if given_s is not None:
        return given_s / num_devices
    return 1 / (num_devices / DEVICE_MEAN_TIME_TO_FAILURE_S + OTHER_STOPS_PER_S)


def saving_interval_s(save_s: float | None, *, between_stops_s: float) -> float:
    """Return the seconds of training from one checkpoint to the next that lose the least time.

    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future
    Generation Computer Systems 22 (2006); its first term is Young's formula.

    Args:
        save_s: Seconds for which a save stops training; None before the first one.
        between_stops_s: Mean seconds from one stop to the next.
    """
    if save_s is None:
        return FIRST_SAVE_S
    if save_s >= 2 * between_stops_s:
        return between_stops_s
    ratio = sqrt(save_s / (2 * between_stops_s))
    return sqrt(2 * save_s * between_stops_s) * (1 + ratio / 3 + ratio**2 / 9) - save_s


@dataclass(frozen=True, slots=True)
class TimeShares:
    """Fractions of the time of a job in the long run, which add up to 1."""

    effective: float
    """Steps that a checkpoint keeps."""
    saving: float
    """Saves that succeed."""
    lost: float
    """Steps that are computed again after a stop, and saves that it cuts short."""
    restarting: float
    """Restarts, among them those that the next stop cuts short."""


def time_shares(
    interval_s: float, *, save_s: float, restart_s: float, between_stops_s: float
) -> TimeShares:
    """Return the shares of a job's time, exact for stops that are distributed exponentially.

    A job takes ``M exp(R/M) (exp((T+D)/M) - 1)`` seconds on average for each interval T with its
    save D, with restarts R and M seconds between stops, which may cut a restart short, too (Daly,
    2006).

    Args:
        interval_s: Seconds of training from one checkpoint to the next.
        save_s: Seconds for which a save stops training.
        restart_s: Seconds from a stop to the next step.
        between_stops_s: Mean seconds from one stop to the next.
    """
    restarts = restart_s / between_stops_s
    try:
        stops = exp(restarts) * expm1((interval_s + save_s) / between_stops_s)
    except OverflowError:  # no interval ends without a stop
        return TimeShares(0.0, 0.0, exp(-restarts), -expm1(-restarts))
    whole_s = between_stops_s * stops
    effective, saving = interval_s / whole_s, save_s / whole_s
    restarting = -expm1(-restarts)
    return TimeShares(effective, saving, 1 - effective - saving - restarting, restarting)
