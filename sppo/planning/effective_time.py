"""Effective training time of a planned run: what saves, stops and restarts leave of it."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from sppo.config.run import RunConfig
from sppo.cost.memory.state_memory import whole_checkpoint_bytes
from sppo.hardware.description import HardwareSpec
from sppo.hardware.faults import (
    TimeShares,
    mean_time_between_stops_s,
    saving_interval_s,
    time_shares,
)
from sppo.units import format_duration

STORAGE_BYTES_PER_S = 2e12 / 2048
"""Bytes that a node without a measured disk writes in a second: 2 TB/s, sustained, of the storage
of 16 384 GPUs in nodes of 8 (The Llama 3 Herd of Models, arXiv:2407.21783)."""


@dataclass(frozen=True, slots=True)
class EffectiveTime:
    """Predicted saves and stops of a run, and the shares of its time."""

    save_s: float
    """Seconds of a save for which training waits."""
    interval_s: float
    """Seconds of training from one checkpoint to the next."""
    restart_s: float
    """Seconds from a stop to the next step."""
    between_stops_s: float
    """Mean seconds from one stop to the next."""
    shares: TimeShares

    def text(self) -> str:
        """Return the shares of the time, and what they rest on, on one line."""
        shares = self.shares
        return (
            f"{shares.effective:.1%}; saving takes {shares.saving:.1%} (every "
            f"{format_duration(self.interval_s)}, {format_duration(self.save_s)} each), lost work "
            f"{shares.lost:.1%}, restarts {shares.restarting:.1%} (a stop every "
            f"{format_duration(self.between_stops_s)}, {format_duration(self.restart_s)} each)"
        )


def effective_time(
    run: RunConfig, *, hardware: HardwareSpec, num_devices: int, step_s: float, restart_s: float
) -> EffectiveTime | None:
    """Return the effective training time; None if the length of an interval is not known.

    A checkpoint is saved as training saves it: by the clock, after whole steps; after
    ``checkpoint.every`` steps; or at the end alone. Training waits for each save.

    Args:
        run: Validated run configuration.
        hardware: Machine of the run.
        num_devices: Devices that the plan uses.
        step_s: Predicted seconds of a step.
        restart_s: Seconds from a stop to the next step.
    """
    nodes = ceil(num_devices / hardware.node.num_devices)
    node_rate = hardware.node.disk_write_bytes_per_s or STORAGE_BYTES_PER_S
    save_s = whole_checkpoint_bytes(run) / (nodes * node_rate)
    between_stops_s = mean_time_between_stops_s(run.hardware, num_devices=num_devices)
    every = run.checkpoint.every
    if isinstance(every, str):
        steps = ceil(saving_interval_s(save_s, between_stops_s=between_stops_s) / step_s)
    elif every == 0 and run.train.epochs is not None:
        return None
    else:
        steps = every or run.train.steps
    interval_s = steps * step_s
    times = {"save_s": save_s, "restart_s": restart_s, "between_stops_s": between_stops_s}
    return EffectiveTime(interval_s=interval_s, shares=time_shares(interval_s, **times), **times)
