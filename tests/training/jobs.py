"""Jobs for tests: of a process that trains alone, and of a rank in the rank pool; their files."""

import contextlib
import json
import math
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from rich.console import Console

from sppo.checkpoint.tensors import read_tensors, saved_shapes
from sppo.config import load_run
from sppo.engine.unit import SequenceData
from sppo.parallel.host_collectives import HostCollectives
from sppo.parallel.job.flight_record import RankProgress
from sppo.parallel.mesh import Mesh
from sppo.training import trainer
from sppo.training.devices.cpu_device import CpuDevice
from sppo.training.evaluation.evaluated_run import evaluate
from sppo.training.job import Job, mesh_shape
from sppo.training.preflight import preflight
from sppo.training.report import report
from sppo.training.state import build_state
from tests.unpainted import unpainted


def job_alone(run, *, device=None, console=None):
    """Job of a process that trains alone; it prints nothing without a console."""
    console = console or Console(quiet=True)
    return Job.alone(run, device=device or CpuDevice(), console=console)


def job_of_rank(run, rank, *, device=None):
    """Job of one of the run's ranks, all of them on this machine."""
    shape, device = mesh_shape(run), device or CpuDevice()
    mesh = Mesh(shape, rank=rank, timeout_s=30.0, device=device.group_device)
    peers, progress = HostCollectives(mesh.groups.world), RankProgress(None)
    return Job(run, device, Console(quiet=True), mesh, peers, progress, shape.num_ranks)


def job_beside(run, *, local_ranks, device=None):
    """Job of a process that is alone and shares its machine, as far as checks and plans know."""
    return replace(job_alone(run, device=device), local_ranks=local_ranks)


def train_alone(run, *, console=None, device=None, reports=False):
    """Train in this process, and write the report if asked, with unpainted plots."""
    job = job_alone(run, device=device, console=console)
    checked = preflight(job)
    outcome = trainer.train(checked)
    if reports:
        _report(checked, outcome)
    return outcome


def _report(checked, outcome):
    with unpainted():
        report(checked, outcome, command="the same command")


def train_rank(rank, directory, arguments=(), *, device=None, reports=False):
    """Train as one rank of ``run.yaml`` in a directory, in the rank pool, without a warm-up."""
    with (
        contextlib.chdir(directory),
        mock.patch.object(trainer, "warm_up", return_value=None),
    ):
        job = job_of_rank(load_run(Path("run.yaml"), arguments), rank, device=device)
        checked = preflight(job)
        outcome = trainer.train(checked)
        if reports and job.mesh.is_main:
            _report(checked, outcome)
        return checked, outcome


def trained(rank, directory, arguments):
    """Train as one rank; what that returns stays in the rank."""
    train_rank(rank, directory, arguments)


def execute_step(rank, run, plan):
    """Compute the gradients of one step of a plan as one of its ranks, which may be emulated.

    Returns its place in the pipeline, and the actions that it executed.
    """
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        job = job_of_rank(run, rank) if mesh_shape(run).num_ranks > 1 else job_alone(run)
        tokens = torch.arange(run.sequence.length + 1) % run.model.vocab_size
        data = [SequenceData(tokens[:-1], tokens[1:])] * plan.sequences
        with contextlib.closing(build_state(job, plan)) as state:
            done = state.engine.accumulate(data, [plan.boundaries] * plan.sequences)
        return job.mesh.at.pipeline, tuple(executed.action for executed in done.trace)


def evaluate_alone(run, source, *, device=None, most=None, on_sequence=lambda done, total: None):
    """What one process says of the weights of a checkpoint; None for those a run starts from."""
    job = job_alone(run, device=device)
    return evaluate(job, source, most=most, on_sequence=on_sequence)


def evaluate_initial(run, **options):
    """What a run says before it has trained."""
    return evaluate_alone(run, None, **options)


def saved_state(checkpoint):
    """Tensors of a checkpoint, by name."""
    return read_tensors(checkpoint, names=list(saved_shapes(checkpoint)))


def records(output):
    """Metrics of each step of a run, as its file has them."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def losses(output):
    """Loss and gradient norm of each step of a run; NaN for a step without loss."""
    found = records(output)
    return [(math.nan if m["loss"] is None else m["loss"], m["grad_norm"]) for m in found]


def summary(output):
    """What ``run_summary.json`` of a run says."""
    return json.loads((output / "run_summary.json").read_text())
