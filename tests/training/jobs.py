"""Jobs for tests: of a process that trains alone, and of a rank in the rank pool; their files."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console

from sppo.config import RunConfig, load_run
from sppo.parallel.host_collectives import HostCollectives
from sppo.parallel.job.flight_record import RankProgress
from sppo.parallel.mesh import Mesh
from sppo.training import trainer
from sppo.training.devices.cpu_device import CpuDevice
from sppo.training.devices.device import Device
from sppo.training.evaluation import Evaluation, evaluate
from sppo.training.job import Job, mesh_shape
from sppo.training.preflight import CheckedRun, preflight
from sppo.training.records import TrainingOutcome
from sppo.training.report import report


def job_alone(
    run: RunConfig, *, device: Device | None = None, console: Console | None = None
) -> Job:
    """Job of a process that trains alone; it prints nothing without a console."""
    console = console or Console(quiet=True)
    return Job.alone(run, device=device or CpuDevice(), console=console)


def job_of_rank(run: RunConfig, rank: int, *, device: Device | None = None) -> Job:
    """Job of one of the run's ranks, all of them on this machine."""
    shape, device = mesh_shape(run), device or CpuDevice()
    mesh = Mesh(shape, rank=rank, timeout_s=30.0, device=device.group_device)
    peers, progress = HostCollectives(mesh.groups.world), RankProgress.create(None)
    return Job(run, device, Console(quiet=True), mesh, peers, progress, shape.num_ranks)


def job_beside(run: RunConfig, *, local_ranks: int, device: Device | None = None) -> Job:
    """Job of a process that is alone and shares its machine, as far as checks and plans know."""
    return replace(job_alone(run, device=device), local_ranks=local_ranks)


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
    outcome = trainer.train(checked)
    if reports:
        report(checked, outcome, command="the same command")
    return outcome


def train_rank(
    rank: int,
    directory: Path,
    arguments: Sequence[str] = (),
    *,
    device: Device | None = None,
    reports: bool = False,
) -> tuple[CheckedRun, TrainingOutcome]:
    """Train as one rank of ``run.yaml`` in a directory, in the rank pool, without a warm-up."""
    with (
        contextlib.chdir(directory),
        mock.patch.object(trainer, "warm_up", return_value=None),
    ):
        job = job_of_rank(load_run(Path("run.yaml"), arguments), rank, device=device)
        checked = preflight(job)
        outcome = trainer.train(checked)
        if reports and job.mesh.is_main:
            report(checked, outcome, command="the same command")
        return checked, outcome


def evaluate_initial(
    run: RunConfig,
    *,
    device: Device | None = None,
    most: int | None = None,
    on_sequence: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """What a run says before it has trained."""
    device = device or CpuDevice()
    return evaluate(run, None, device=device, most=most, on_sequence=on_sequence)


def records(output: Path) -> list[dict[str, Any]]:
    """Metrics of each step of a run, as its file has them."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def losses(output: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of a run; NaN for a step without loss."""
    found = records(output)
    return [(math.nan if m["loss"] is None else m["loss"], m["grad_norm"]) for m in found]


def summary(output: Path) -> dict[str, Any]:
    """What ``run_summary.json`` of a run says."""
    found: dict[str, Any] = json.loads((output / "run_summary.json").read_text())
    return found
