"""Trace of a training step of one rank on a fake GPU, with the predictions of its plan."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, cast

import torch
from rich.console import Console

from sppo.config.run import RunConfig
from sppo.cost.layer import Workload
from sppo.cost.memory.stage_memory import MemoryBuckets
from sppo.dry_run.communication import FakeHostCollectives
from sppo.dry_run.fake_gpu import FakeGpu, fake_gpu
from sppo.dry_run.orderings import OrderingCheck
from sppo.dry_run.streams import Moment, Wait
from sppo.engine.step_programs import PlannedStep
from sppo.engine.unit import SequenceData
from sppo.parallel.host_collectives import HostCollectives
from sppo.parallel.mesh import Mesh
from sppo.planning.elastic.step_plan import StepPlan, step_planner
from sppo.planning.plan import ExecutionPlan
from sppo.schedule.actions import Action
from sppo.training.devices.cuda_device import CudaDevice
from sppo.training.job import Job
from sppo.training.ranks import Ranks, mesh_shape
from sppo.training.state import TrainingState, build_state
from sppo.training.steps.measured import MeasuredBuckets, predicted_and_measured
from sppo.training.steps.step import StepInput, run_step

TRACED_STEPS = 2
"""Steps of a trace; the last is reported, when buffers that the first step keeps are allocated."""


@dataclass(frozen=True, slots=True)
class ActionCounts:
    """Average host work of the actions of one kind in a step.

    Attributes:
        num_actions: Number of actions of the kind in the step.
        operations: Calls of torch operations per action.
        launches: Kernels, copies and communications issued to the GPU per action.
    """

    num_actions: int
    operations: float
    launches: float


@dataclass(frozen=True, slots=True)
class TracedStep:
    """Memory, launches and waits of one rank in a traced step.

    Attributes:
        rank: Index of the rank.
        predicted: Memory that the plan predicts for the rank.
        measured: Memory that the rank held, by bucket.
        peak_bytes: Peak bytes of all tensors of the rank.
        peaks: Peak bytes of each moment of the step.
        actions: Host work by kind of action; work outside the program is under "update".
        host_waits: Number of waits of the host for the GPU, by reason and function.
        waits: Number of waits of streams and host threads in all steps, by kind.
        kernels: Number of launches by name, most frequent first.
        backend: Name of the attention back end that the fake one replaced.
        num_streams: Number of streams of the rank, including those of communicators.
        num_layers: Layers of all stages of the rank.
        seconds: Seconds that the trace took.
        traced_layers: Numbers of layers in the traces from which this one is extrapolated; () if
            all layers were traced.
        traced_fullest: Fullest moment of each trace in `traced_layers`.
    """

    rank: int
    predicted: MemoryBuckets
    measured: MeasuredBuckets
    peak_bytes: int
    peaks: Mapping[Moment, int]
    actions: Mapping[str, ActionCounts]
    host_waits: Mapping[str, int]
    waits: Mapping[Wait, int]
    kernels: Mapping[str, int]
    backend: str
    num_streams: int
    num_layers: int
    seconds: float
    traced_layers: tuple[int, ...] = ()
    traced_fullest: tuple[Moment, ...] = ()

    @property
    def fullest(self) -> Moment:
        """Moment with the most bytes."""
        return max(self.peaks, key=lambda moment: self.peaks[moment])

    @property
    def buckets(self) -> dict[str, tuple[int, int]]:
        """Predicted and traced bytes by bucket; "all" is the peak."""
        return predicted_and_measured(self.predicted, self.measured, all_bytes=self.peak_bytes)


@dataclass(slots=True)
class _Counting:
    """Counter of operations and launches by kind of action."""

    gpu: FakeGpu
    kind: str = "update"
    operations: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    seen: tuple[int, int] = (0, 0)

    def begin(self, kind: str, action: str | None = None) -> None:
        """Count the following work under ``kind``, and its memory under ``action`` or ``kind``."""
        self.gpu.runtime.action = action or kind
        recorder = self.gpu.recorder
        now = recorder.num_operations, recorder.launches.total()
        self.operations[self.kind] += now[0] - self.seen[0]
        self.launches[self.kind] += now[1] - self.seen[1]
        self.kind, self.seen = kind, now
        self.actions[kind] += 1

    def result(self) -> dict[str, ActionCounts]:
        """Return the average counts per action, by kind."""
        return {
            kind: ActionCounts(count, self.operations[kind] / count, self.launches[kind] / count)
            for kind, count in self.actions.items()
        }


def trace_step(
    run: RunConfig,
    plan: ExecutionPlan,
    *,
    rank: int = 0,
    steps: int = TRACED_STEPS,
    samples: Sequence[Sequence[int]] = (),
    orderings: OrderingCheck | None = None,
    lost: frozenset[Wait] = frozenset(),
    on_action: Callable[[], None] = lambda: None,
) -> TracedStep:
    """Build the state of one rank of ``run`` and train for a few steps, without data.

    Args:
        run: Run configuration with all parallel degrees.
        plan: Plan of the run.
        rank: Index of the rank to trace.
        steps: Number of steps, of which the last is returned; not used with `samples`.
        samples: Tokens of each sample of each step; () for sequences that are cut alike.
        orderings: Check that is given every access of memory in all steps; None for no check.
        lost: Waits that are left out, to test the check.
        on_action: Callback before every action of every step.
    """
    begin = time.perf_counter()
    parallel = run.parallel
    workload = Workload(
        run.model,
        plan.hardware,
        dtype=run.train.dtype,
        sequence_parallel_degree=parallel.sequence_parallel_degree,
        sequence_parallel=parallel.sequence_parallel,
    )
    with fake_gpu(workload, rank=rank, orderings=orderings, lost=lost) as gpu:
        traced = _Steps(run, plan, gpu=gpu, rank=rank, samples=samples, on_action=on_action)
        step = traced.run(len(samples) or steps)
    seconds = time.perf_counter() - begin
    return TracedStep(**step, backend=gpu.backend, rank=rank, seconds=seconds)


class _Steps:
    """Training state of one rank, and its steps."""

    def __init__(
        self,
        run: RunConfig,
        plan: ExecutionPlan,
        *,
        gpu: FakeGpu,
        rank: int,
        samples: Sequence[Sequence[int]],
        on_action: Callable[[], None],
    ) -> None:
        self._run, self._plan, self._gpu, self._on_action = run, plan, gpu, on_action
        planner = step_planner(plan)
        self._step_plans = [planner.plan(lengths) for lengths in samples]
        self._step_plan: StepPlan | None = None
        device = torch.device("cuda", 0)
        shape = mesh_shape(run)
        ranks = Ranks.alone()
        if shape.num_ranks > 1:
            mesh = Mesh(shape, rank=rank, timeout_s=run.parallel.timeout_s, device=device)
            ranks = Ranks(mesh, cast(HostCollectives, FakeHostCollectives()), ranks.progress)
        self._mesh = ranks.mesh
        self._job = Job(run, ranks, CudaDevice(device), Console(quiet=True))
        self._state = build_state(self._job, plan)
        self._buckets = MeasuredBuckets()
        self._buckets.count_state(self._state)

    def run(self, steps: int) -> dict[str, Any]:
        """Train for `steps` steps, and return the fields of :class:`TracedStep` of the last one."""
        gpu, state = self._gpu, self._state
        for step in range(steps):
            self._step_plan = self._step_plans[step] if self._step_plans else None
            gpu.runtime.host_waits.clear()
            gpu.recorder.launches.clear()
            gpu.recorder.num_operations = 0
            counting = self._step(step + 1)
        ranks = self._step_plan.evaluated.memory if self._step_plan else self._plan.rank_memory
        memory = ranks[self._mesh.at.pipeline].device
        pool = self._job.device.pool()
        assert pool is not None, "a GPU's tensors come from a pool"
        host_waits = dict(gpu.runtime.host_waits)
        state.close()
        return {
            "predicted": memory,
            "measured": self._buckets,
            "peak_bytes": pool.used_peak_bytes,
            "peaks": dict(gpu.runtime.peaks),
            "actions": counting.result(),
            "host_waits": host_waits,
            "waits": dict(gpu.runtime.waits),
            "kernels": dict(gpu.recorder.launches.most_common()),
            "num_streams": gpu.runtime.num_streams,
            "num_layers": self._num_layers,
        }

    def _step(self, number: int) -> _Counting:
        """Run one step, and return the counts of its host work."""
        counting, state = _Counting(self._gpu), self._state
        counting.begin("update")

        def before_action(position: int, action: Action) -> None:
            counting.begin(action.kind.value, str(action))
            self._on_action()

        self._job.device.reset_peak()
        done = run_step(
            self._job,
            _CountedState(
                state.tensors, state.engine, state.sharded, lambda: counting.begin("update")
            ),
            self._work(number),
            began_s=time.perf_counter(),
            before_action=before_action,
            decide=lambda sums: self._run.optimizer.lr,
        )
        self._buckets.count_step(
            done.peaks, copies_bytes=done.copies.device_bytes, pool=self._job.device.pool()
        )
        counting.begin("update")
        counting.actions["update"] = 1
        return counting

    def _work(self, number: int) -> StepInput:
        """Return the sequences of a step, with fake tensors for tokens, all of which have labels.

        Of samples, all sequences are those of the plan of the step.
        """
        parts: list[tuple[Sequence[int], Sequence[int]]]
        plan = self._step_plan
        if plan is None:
            whole = (self._run.sequence.length,)
            parts = [(whole, self._plan.boundaries)] * self._num_sequences
        else:
            parts = [(packed.samples, packed.boundaries) for packed in plan.sequences]
        return StepInput(
            number=number,
            sequences=[_sequence(boundaries[-1], samples) for samples, boundaries in parts],
            boundaries=[boundaries for _, boundaries in parts],
            num_valid=sum(boundaries[-1] for _, boundaries in parts),
            step_s=self._plan.predicted.step_s,
            planned=None if plan is None else PlannedStep(plan.program, plan.placements),
        )

    @property
    def _num_layers(self) -> int:
        stages = range(
            self._mesh.at.pipeline, len(self._plan.stages), len(self._mesh.pipeline_ranks)
        )
        return sum(self._plan.stages[s].num_layers for s in stages)

    @property
    def _num_sequences(self) -> int:
        return self._run.train.sequences_per_step // self._mesh.shape.data_parallel


@dataclass(frozen=True, slots=True)
class _CountedState(TrainingState):
    """Training state that tells when all actions of a step are issued."""

    issued: Callable[[], None]

    def finish_gradients(self, await_device: Callable[[], None]) -> None:
        """Tell, then wait for the gradients of all ranks, but not for the device, which is fake."""
        self.issued()
        TrainingState.finish_gradients(self, lambda: None)


def _sequence(tokens: int, samples: Sequence[int]) -> SequenceData:
    """Return fake tokens with labels, of samples of these lengths one after another."""
    tokens_S = torch.empty(tokens, dtype=torch.long)
    return SequenceData(tokens_S, tokens_S, tuple(accumulate(samples[:-1], initial=0)))
