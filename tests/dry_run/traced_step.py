"""Trace of a training step of one rank on a fake GPU, with the predictions of its plan."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import cast

import torch
from rich.console import Console

from sppo.config.run import RunConfig
from sppo.cost.memory.stage_memory import MemoryBuckets
from sppo.cost.workload import Workload
from sppo.engine.step_programs import PlannedStep
from sppo.engine.unit import SequenceData
from sppo.parallel.host_collectives import HostCollectives
from sppo.parallel.mesh import Mesh
from sppo.planning.elastic.step_plan import StepPlan
from sppo.planning.elastic.step_planner import step_planner
from sppo.planning.plan import ExecutionPlan
from sppo.training.devices.cuda_device import CudaDevice
from sppo.training.job import Job, mesh_shape
from sppo.training.records.outcome import MeasuredBuckets, predicted_and_measured
from sppo.training.state import build_state
from sppo.training.step import StepInput, run_step
from tests.dry_run.communication import FakeHostCollectives
from tests.dry_run.fake_gpu import FakeGpu, fake_gpu
from tests.dry_run.orderings import OrderingCheck
from tests.dry_run.streams import Wait

TRACED_STEPS = 2
"""Steps of a trace; the last is reported, when buffers that the first step keeps are allocated."""


@dataclass(frozen=True, slots=True)
class TracedStep:
    """Memory and waits of one rank in a traced step.

    Attributes:
        predicted: Memory that the plan predicts for the rank.
        measured: Memory that the rank held, by bucket.
        peak_bytes: Peak bytes of all tensors of the rank.
        host_waits: Number of waits of the host for the GPU, by reason and function.
        waits: Number of waits of streams and host threads in all steps, by kind.
        backend: Name of the attention back end that the fake one replaced.
    """

    predicted: MemoryBuckets
    measured: MeasuredBuckets
    peak_bytes: int
    host_waits: Mapping[str, int]
    waits: Mapping[Wait, int]
    backend: str

    @property
    def buckets(self) -> dict[str, tuple[int, int]]:
        """Predicted and traced bytes by bucket; "all" is the peak."""
        return predicted_and_measured(self.predicted, self.measured, all_bytes=self.peak_bytes)


def trace_step(
    run: RunConfig,
    plan: ExecutionPlan,
    *,
    rank: int = 0,
    samples: Sequence[Sequence[int]] = (),
    orderings: OrderingCheck | None = None,
    lost: frozenset[Wait] = frozenset(),
) -> TracedStep:
    """Build the state of one rank of ``run`` and train for a few steps, without data.

    Args:
        run: Run configuration with all parallel degrees.
        plan: Plan of the run.
        rank: Index of the rank to trace.
        samples: Tokens of each sample of each step; () for sequences that are cut alike.
        orderings: Check that is given every access of memory in all steps; None for no check.
        lost: Waits that are left out, to test the check.
    """
    parallel = run.parallel
    workload = Workload(
        run.model,
        plan.hardware,
        dtype=run.train.dtype,
        sequence_parallel_degree=parallel.sequence_parallel_degree,
        sequence_parallel=parallel.sequence_parallel,
        moments=run.optimizer.moments,
    )
    with fake_gpu(workload, rank=rank, orderings=orderings, lost=lost) as gpu:
        planner = step_planner(plan)
        steps = [planner.plan(lengths) for lengths in samples]
        gc.disable()  # what it frees in the middle of a step would count in the working set
        try:
            return _Training(run, plan, gpu=gpu, rank=rank).run(steps or [None] * TRACED_STEPS)
        finally:
            gc.enable()


class _Training:
    """Training state of one rank, and its steps."""

    def __init__(self, run: RunConfig, plan: ExecutionPlan, *, gpu: FakeGpu, rank: int) -> None:
        self._run, self._plan, self._gpu = run, plan, gpu
        device = torch.device("cuda", 0)
        shape = mesh_shape(run)
        job = Job.alone(run, device=_FakeDevice(device), console=Console(quiet=True))
        if shape.num_ranks > 1:
            mesh = Mesh(shape, rank=rank, timeout_s=run.parallel.timeout_s, device=device)
            job = replace(job, mesh=mesh, peers=cast(HostCollectives, FakeHostCollectives()))
        self._job, self._mesh = job, job.mesh
        self._state = build_state(self._job, plan)
        self._buckets = MeasuredBuckets()
        self._buckets.count_state(self._state)

    def run(self, steps: Sequence[StepPlan | None]) -> TracedStep:
        """Train for `steps`, each with its plan, if it has one, and return the last one."""
        waits = self._gpu.runtime.host_waits
        for step in steps:
            waits.clear()
            self._step(step)
        memory = step.evaluated.memory if step else self._plan.rank_memory
        pool = self._job.device.pool()
        assert pool is not None, "a GPU's tensors come from a pool"
        traced = TracedStep(
            predicted=memory[self._mesh.at.pipeline].device,
            measured=self._buckets,
            peak_bytes=pool.used_peak_bytes,
            host_waits=dict(waits),
            waits=dict(self._gpu.runtime.waits),
            backend=self._gpu.backend,
        )
        self._state.close()
        return traced

    def _step(self, step: StepPlan | None) -> None:
        self._job.device.reset_peak()
        length = self._run.sequence.length
        done = run_step(
            self._job,
            self._state,
            _samples(step) if step else self._sequences(length),
            began_s=time.perf_counter(),
            before_action=lambda position, action: None,
            decide=lambda sums: self._run.optimizer.lr,
        )
        self._buckets.count_step(
            done.peaks, copies_bytes=done.copies.device_bytes, pool=self._job.device.pool()
        )

    def _sequences(self, length: int) -> StepInput:
        """Return the sequences of a step, with fake tensors for tokens."""
        count = self._run.train.sequences_per_step // self._mesh.shape.data_parallel
        return _input([(length,)] * count, [self._plan.boundaries] * count)


class _FakeDevice(CudaDevice):
    """Device whose work is done when it is issued."""

    def wait_with_timeout(self, marks: Sequence[object], *, stall_timeout_s: float) -> bool:
        """Return True at once."""
        return True


def _samples(plan: StepPlan) -> StepInput:
    """Return the sequences of a step of samples, with fake tensors for tokens."""
    return _input(
        [packed.samples for packed in plan.sequences],
        [packed.boundaries for packed in plan.sequences],
        planned=PlannedStep(plan.program, plan.placements),
    )


def _input(
    documents: Sequence[Sequence[int]],
    boundaries: Sequence[Sequence[int]],
    *,
    planned: PlannedStep | None = None,
) -> StepInput:
    """Return a step of sequences of documents of these lengths, all of whose tokens have labels."""
    sequences = []
    for lengths in documents:
        tokens_S = torch.empty(sum(lengths), dtype=torch.long)
        starts = tuple(accumulate(lengths[:-1], initial=0))
        sequences.append(SequenceData(tokens_S, tokens_S, starts))
    return StepInput(
        number=1,
        sequences=sequences,
        boundaries=boundaries,
        num_valid=sum(map(sum, documents)),
        step_s=1.0,
        planned=planned,
    )
