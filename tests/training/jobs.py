"""Jobs for tests: of a process that trains alone, and of a rank in the rank pool."""

from __future__ import annotations

from rich.console import Console

from sppo.config import RunConfig
from sppo.parallel.host_collectives import HostCollectives
from sppo.parallel.job.flight_record import RankProgress
from sppo.parallel.mesh import Mesh
from sppo.training import trainer
from sppo.training.devices.cpu_device import CpuDevice
from sppo.training.devices.device import Device
from sppo.training.job import Job, Ranks, mesh_shape
from sppo.training.preflight import preflight
from sppo.training.report import report
from sppo.training.steps.outcome import TrainingOutcome


def job_alone(
    run: RunConfig, *, device: Device | None = None, console: Console | None = None
) -> Job:
    """Job of a process that trains alone; it prints nothing without a console."""
    return Job(run, Ranks.alone(), device or CpuDevice(), console or Console(quiet=True))


def job_of_rank(run: RunConfig, rank: int, *, device: Device | None = None) -> Job:
    """Job of one of the run's ranks, all of them on this machine."""
    shape, device = mesh_shape(run), device or CpuDevice()
    mesh = Mesh(shape, rank=rank, timeout_s=30.0, device=device.group_device)
    ranks = Ranks(mesh, HostCollectives(mesh), RankProgress.create(None), shape.num_ranks)
    return Job(run, ranks, device, Console(quiet=True))


def job_beside(run: RunConfig, *, local_ranks: int, device: Device | None = None) -> Job:
    """Job of a process that is alone and shares its machine, as far as checks and plans know."""
    ranks = Ranks.alone()
    ranks = Ranks(ranks.mesh, ranks.peers, ranks.progress, local_ranks)
    return Job(run, ranks, device or CpuDevice(), Console(quiet=True))


def train_alone(
    run: RunConfig,
    *,
    console: Console | None = None,
    device: Device | None = None,
    reports: bool = False,
) -> TrainingOutcome:
    """Train in this process, and write the report if asked."""
    job = job_alone(run, device=device, console=console)
    checked = preflight(job)
    outcome = trainer.train(job, checked)
    if reports:
        report(job, checked, outcome, command="the same command")
    return outcome
