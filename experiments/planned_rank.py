"""One rank of a run, set up as ``sppo train`` does; used by comparisons that time single steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from experiments.harness import TIMEOUT
from sppo.config import RunConfig, check_run
from sppo.engine.engine import StepResult
from sppo.engine.step_programs import PlannedStep
from sppo.engine.unit import SequenceData
from sppo.hardware.this_machine import as_seen_by_ranks, detect_machine
from sppo.kernels.native.machine_memory import memory_room
from sppo.offload.disk.disk_room import usable_directory
from sppo.parallel.host_collectives import HostCollectives
from sppo.parallel.mesh import Mesh
from sppo.parallel.mesh_shape import MeshShape
from sppo.planning.plan import ExecutionPlan
from sppo.planning.run_plan import plan_run
from sppo.schedule.timeline import Timeline
from sppo.training.devices.cpu_device import CpuDevice
from sppo.training.job import Job
from sppo.training.records.executed_step import executed_timeline
from sppo.training.state import build_state
from sppo.training.warm_up import warm_up


def joined_job(run: RunConfig, rank: int, device: CpuDevice) -> Job:
    """Return the job of a rank of a pipeline, which is the default process group."""
    job = Job.alone(run, device=device, console=Console(quiet=True))
    count = run.parallel.pipeline_parallel_degree
    if count == 1:
        return job
    shape = MeshShape(pipeline_parallel=count)
    mesh = Mesh(shape, rank=rank, timeout_s=TIMEOUT.total_seconds())
    return replace(job, mesh=mesh, peers=HostCollectives(mesh.groups.world), local_ranks=count)


class PlannedRank:
    """One rank of a run that trains on random tokens.

    Args:
        keys: Run file, without data.
        rank: Rank in the pipeline.
        updates: Whether a step ends with an update of the weights, which one rank can do.
    """

    def __init__(self, keys: Mapping[str, Any], *, rank: int = 0, updates: bool = False) -> None:
        device = CpuDevice()
        device.begin()
        run = check_run({"data": {"tokens": "."}, **keys}, source="experiments")
        self.job = job = joined_job(run, rank, device)
        count, disk = job.local_ranks, run.activations.disk
        self.plan: ExecutionPlan = job.peers.decided_by_main(
            lambda: plan_run(
                run,
                hardware=as_seen_by_ranks(detect_machine(), count, is_here=True),
                available_bytes=memory_room().share_bytes(count),
                disk_bytes=0 if disk is None else usable_directory(Path(disk)).usable_bytes,
            )
        )
        warm_up(run, lengths=self.plan.lengths, device=device)
        self.state = build_state(job, self.plan)
        self._data = [
            SequenceData(tokens[:-1], tokens[1:])
            for tokens in random_tokens(run.train.sequences_per_step, run.sequence.length)
        ]
        self._updates = updates
        self.done: StepResult | None = None

    def step(self) -> None:
        """Run forward and backward of all sequences, and the update if there is one."""
        self.run(self._data, [self.plan.boundaries] * len(self._data))
        if self._updates:
            self.state.optimizer.step(self.state.sharded.owned(self.state.gradients), lr=3e-4)

    def run(
        self,
        data: Sequence[SequenceData],
        cuts: Sequence[Sequence[int]],
        planned: PlannedStep | None = None,
    ) -> None:
        """Run forward and backward of sequences, by the plan of the run unless another is given."""
        self.state.zero_gradients()
        self.done = self.state.engine.accumulate(data, cuts, planned=planned)

    def loss(self) -> float:
        """Return the mean loss of the last step; every rank must call this method."""
        assert self.done is not None, "after a step"
        return self.job.peers.total([float(self.done.total_loss)])[0] / self.done.num_valid

    def timeline(self) -> Timeline | None:
        """Return the timeline of the last step on rank 0; every rank must call this method."""
        assert self.done is not None, "after a step"
        return executed_timeline(self.done, self.job)


def random_tokens(sequences: int, length: int) -> torch.Tensor:
    """Return tokens of sequences, one more each than their length: the last is a label."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (sequences, length + 1), generator=generator)
