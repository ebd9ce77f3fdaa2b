"""A training step of one rank on a fake GPU, beside what was planned for it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, cast

import torch

from sppo.config.run import RunConfig
from sppo.cost.layer import Workload
from sppo.cost.memory.stage_memory import MemoryBuckets
from sppo.dry_run.communication import FakeHostCollectives
from sppo.dry_run.fake_gpu import FakeGpu, fake_gpu
from sppo.dry_run.orderings import OrderingCheck
from sppo.dry_run.streams import Moment, Wait
from sppo.engine.engine import PlannedStep
from sppo.engine.unit import SequenceData
from sppo.parallel.host_collectives import HostCollectives
from sppo.parallel.mesh import Mesh, alone
from sppo.planning.elastic.step_plan import StepPlan, step_planner
from sppo.planning.plan import ExecutionPlan
from sppo.schedule.actions import Action
from sppo.training.devices.cuda_device import CudaDevice
from sppo.training.ranks import mesh_shape
from sppo.training.state import TrainingState, build_state
from sppo.training.steps.measured import MeasuredBuckets, predicted_and_measured
from sppo.training.steps.step import StepHooks, StepInput, run_step

TRACED_STEPS = 2
"""Buffers that a first step makes and keeps are there in the second, which is reported."""


@dataclass(frozen=True, slots=True)
class ActionCounts:
    """Work that actions of one kind make the host do, each on average.

    Attributes:
        num_actions: Of that kind in the step.
        operations: Calls of torch.
        launches: Kernels, copies and communication given to the GPU.
    """

    num_actions: int
    operations: float
    launches: float


@dataclass(frozen=True, slots=True)
class TracedStep:
    """Memory, launches and waits of one rank's step.

    Attributes:
        rank: Which.
        predicted: Memory that the plan has for it.
        measured: Memory that it held, by bucket.
        peak_bytes: Most bytes of all its tensors at once.
        peaks: The same of each moment of the step.
        actions: By kind, and what is not part of the program under "update".
        host_waits: How often the host waited for the GPU, by where.
        waits: Of streams and hosts in all steps.
        kernels: Launches by name, most first.
        backend: Attention back end that stood for the real one.
        num_streams: Streams of the rank, communicators included.
        num_layers: Layers of the rank's stages.
        seconds: That it took here.
        traced_layers: Numbers of layers that were traced where these are extrapolated; () where
            all were.
        traced_fullest: The fullest moments with so many layers.
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
        """The moment with most bytes."""
        return max(self.peaks, key=lambda moment: self.peaks[moment])

    @property
    def buckets(self) -> dict[str, tuple[int, int]]:
        """Predicted and traced bytes by bucket; "all" is the peak."""
        return predicted_and_measured(self.predicted, self.measured, all_bytes=self.peak_bytes)


@dataclass(slots=True)
class _Counting:
    """Operations and launches by kind of action."""

    gpu: FakeGpu
    kind: str = "update"
    operations: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    seen: tuple[int, int] = (0, 0)

    def begin(self, kind: str, action: str | None = None) -> None:
        """Count what follows as of ``kind``, and its memory as of ``action``."""
        self.gpu.runtime.action = action or kind
        recorder = self.gpu.recorder
        now = recorder.num_operations, recorder.launches.total()
        self.operations[self.kind] += now[0] - self.seen[0]
        self.launches[self.kind] += now[1] - self.seen[1]
        self.kind, self.seen = kind, now
        self.actions[kind] += 1

    def result(self) -> dict[str, ActionCounts]:
        """Return averages by kind."""
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
        run: with all degrees.
        plan: of it.
        rank: which.
        steps: of which the last one is returned.
        samples: tokens of the samples of each step; () for sequences that are all alike.
        orderings: takes in every access of memory in all steps; None: none is looked at.
        lost: waits that are left out, to see what finds that.
        on_action: called before every action of every step.
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
    """The steps of one rank."""

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
        self._mesh = alone()
        self._peers = HostCollectives(self._mesh)
        if shape.num_ranks > 1:
            self._mesh = Mesh(shape, rank=rank, timeout_s=run.parallel.timeout_s, device=device)
            self._peers = cast(HostCollectives, FakeHostCollectives())
        self._device = CudaDevice(device)
        self._state = build_state(run, plan=plan, mesh=self._mesh, device=self._device)
        self._buckets = MeasuredBuckets()
        self._buckets.count_state(self._state)

    def run(self, steps: int) -> dict[str, Any]:
        """Train, and return what of :class:`TracedStep` the last step says."""
        gpu, state = self._gpu, self._state
        for step in range(steps):
            self._step_plan = self._step_plans[step] if self._step_plans else None
            gpu.runtime.host_waits.clear()
            gpu.recorder.launches.clear()
            gpu.recorder.num_operations = 0
            counting = self._step(state)
        ranks = self._step_plan.evaluated.memory if self._step_plan else self._plan.rank_memory
        memory = ranks[self._mesh.at.pipeline].device
        pool = self._device.pool()
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

    def _step(self, state: TrainingState) -> _Counting:
        """Run one step, and count what it makes the host do."""
        counting = _Counting(self._gpu)
        counting.begin("update")

        def before_action(position: int, action: Action) -> None:
            counting.begin(action.kind.value, str(action))
            self._on_action()

        run_step(
            state,
            StepHooks(
                read=self._read,
                before_action=before_action,
                accumulated=lambda: counting.begin("update"),
                learning_rate=lambda sums: self._run.optimizer.lr,
            ),
            clip_norm=self._run.optimizer.clip_norm,
            device=self._device,
            peers=self._peers,
            buckets=self._buckets,
        )
        counting.begin("update")
        counting.actions["update"] = 1
        return counting

    def _read(self) -> StepInput:
        """Return sequences without data."""
        if self._step_plan is not None:
            return _input_of(self._step_plan)
        length = self._run.sequence.length
        tokens = [torch.empty(length, dtype=torch.long) for _ in range(self._num_sequences)]
        sequences = [SequenceData(tokens_S, tokens_S) for tokens_S in tokens]
        return StepInput(sequences, [self._plan.boundaries] * len(sequences), num_valid=length)

    @property
    def _num_layers(self) -> int:
        stages = range(
            self._mesh.at.pipeline, len(self._plan.stages), len(self._mesh.pipeline_ranks)
        )
        return sum(self._plan.stages[s].num_layers for s in stages)

    @property
    def _num_sequences(self) -> int:
        return self._run.train.sequences_per_step // self._mesh.shape.data_parallel


def _input_of(plan: StepPlan) -> StepInput:
    """Return the sequences of a step of samples, without data."""
    sequences = []
    for packed in plan.sequences:
        tokens_S = torch.empty(packed.tokens, dtype=torch.long)
        starts = tuple(accumulate(packed.samples[:-1], initial=0))
        sequences.append(SequenceData(tokens_S, tokens_S, starts))
    return StepInput(
        sequences,
        [packed.boundaries for packed in plan.sequences],
        num_valid=plan.tokens,
        planned=PlannedStep(plan.program, plan.placements),
    )
