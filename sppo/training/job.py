"""What one rank knows of the job that trains a run: configuration, ranks, device, and console."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console

from sppo.config import RunConfig
from sppo.training.devices.device import Device
from sppo.training.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Job:
    """Training of a run, as one of its ranks sees it.

    Attributes:
        run: Validated run configuration.
        ranks: This process's place among the ranks of the run.
        device: Device of this rank.
        console: Console for progress and results; quiet except on rank 0.
    """

    run: RunConfig
    ranks: Ranks
    device: Device
    console: Console
