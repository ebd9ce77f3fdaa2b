"""One training step of a rank: its work, its run, and whether its update is skipped.

A step is the same on a GPU, on a CPU and on fake tensors.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sppo.cost.flops import ignored_flops, step_flops
from sppo.cost.memory.stage_memory import MemoryBuckets
from sppo.cost.stages.executed_flops import executed_flops
from sppo.cost.trainable import trainable_of_run
from sppo.data.sample_rows import TrainingData
from sppo.engine.engine import EnginePeaks, StepResult
from sppo.engine.step_programs import PlannedStep
from sppo.engine.trace import Trace
from sppo.engine.unit import SequenceData
from sppo.offload.copy_report import CopyReport
from sppo.optim.gradient_norm import clip_factor
from sppo.parallel.job.peer_errors import LATE, PeerLostError
from sppo.parallel.job.timeouts import stall_timeout
from sppo.planning.elastic.step_plan import StepPlan
from sppo.planning.plan import ExecutionPlan
from sppo.schedule.actions import Action
from sppo.training.job import Job
from sppo.training.state import TrainingState
from sppo.training.watch.computed import Computed, StepSums
from sppo.training.watch.corruption import Watch
from sppo.training.weights.choice_biases import balance_


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """Sequences that a step of one replica trains on."""

    number: int
    """Number of the step, counted from 1."""
    sequences: Sequence[SequenceData]
    """Sequences of this replica."""
    boundaries: Sequence[Sequence[int]]
    """Subsequence boundaries of each sequence."""
    num_valid: int
    """Number of valid labels of this replica."""
    step_s: float
    """Predicted seconds of the step."""
    planned: PlannedStep | None = None
    """Program and placements of this step; None to follow the engine's own plan."""


Phases = tuple[float, float, float]
"""Seconds of the forwards, of the backwards, and of the rest of a step: reading data, reducing
gradients over ranks, clipping and the update."""


@dataclass(frozen=True, slots=True, eq=False)
class TakenPlan:
    """Plan of a step, with the time that the step waited for planning."""

    plan: StepPlan
    """Division of the samples over replicas, and the plan of this replica."""
    wait_s: float
    """Seconds that the step waited for the plan; 0 if it was ready."""
    note: str = ""
    """Message on a failure of planning ahead; "" if none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork(StepInput):
    """Work of one step of one replica: its data, plan and predictions."""

    consumed: Sequence[int]
    """Numbers of the sequences, or samples, that all replicas consume."""
    own: Sequence[Sequence[int]]
    """Those that each sequence of this replica consists of, in their order."""
    tokens: int
    """Number of tokens of this replica, without padding."""
    model_flops: int
    """Model FLOPs of this replica's step."""
    executed_flops: int
    """FLOPs of this replica's step, recomputation included."""
    phases_s: Phases
    """Predicted seconds by phase."""
    memory: MemoryBuckets
    """Predicted memory of this rank's device."""
    samples: TakenPlan | None = None
    """Plan of this step of samples; None if all steps are alike."""


class StepSource(ABC):
    """Source of the work of every step, for one rank."""

    @abstractmethod
    def work(self, step: int, *, consumed: int) -> StepWork:
        """Return the work of a step.

        Args:
            step: Number of the step, counted from 0.
            consumed: Number of sequences, or samples, that all earlier steps consumed.

        Raises:
            MemoryError: No plan of the step fits.
        """

    def learn(self, work: StepWork, done: DoneStep) -> Mapping[str, Any]:
        """Learn from the measured times of a step, and return further metrics. Collective."""
        return {}

    def saved(self) -> Mapping[str, Any]:
        """Return the state that a resumed run needs, for the metadata of a checkpoint."""
        return {}

    def close(self) -> None:  # noqa: B027 - most sources prepare nothing
        """End the preparation of further steps; no work may be requested after that."""


class SequenceSteps(StepSource):
    """Source of steps of the token stream, whose sequences have one length; all steps are alike."""

    def __init__(self, job: Job, data: TrainingData, plan: ExecutionPlan) -> None:
        self._job, self._data, self._plan = job, data, plan
        self._executed_flops = executed_flops(plan.candidate(), plan.placement())

    def work(self, step: int, *, consumed: int) -> StepWork:
        """Return the work of a step: the sequences of this replica, cut as planned."""
        run, mesh, predicted = self._job.run, self._job.mesh, self._plan.predicted
        count, length = (
            run.train.sequences_per_step // mesh.shape.data_parallel,
            run.sequence.length,
        )
        indices = self._data.step_samples(consumed)
        first = mesh.at.data * count
        own = [[index] for index in indices[first : first + count]]
        sequences = [self._data.row(samples) for samples in own]
        num_valid = sum(sequence.num_valid for sequence in sequences)
        model, trainable = run.model, trainable_of_run(run)
        saved_flops = ignored_flops(model, count * length - num_valid, trainable)
        model_flops = step_flops(model, trainable, length=length, sequences=count)
        return StepWork(
            number=step + 1,
            sequences=sequences,
            boundaries=[self._plan.boundaries] * count,
            num_valid=num_valid,
            consumed=indices,
            own=own,
            tokens=count * length,
            model_flops=model_flops - saved_flops,
            executed_flops=self._executed_flops - saved_flops,
            step_s=predicted.step_s,
            phases_s=(predicted.forward_s, predicted.backward_s, predicted.update_s),
            memory=self._plan.rank_memory[mesh.at.pipeline].device,
        )


# The run of a step


@dataclass(frozen=True, slots=True)
class DoneStep:
    """Results and times of one step on this rank."""

    result: StepResult
    sums: StepSums
    clipped: float
    """Factor by which an update scales the gradients to clip them."""
    norms: dict[str, dict[str, float]] | None
    """Norms of weights and gradients by kind of parameter; None if this step has none."""
    expert_loads_LX: Tensor | None
    """Number of tokens, of all ranks, that chose each expert of each layer, in float64 on the host;
    None for a model without experts."""
    lr: float | None
    """Learning rate of the update; None if the update was skipped."""
    copies: CopyReport
    """Copies of offloaded tensors, with the state behind the device."""
    peaks: EnginePeaks
    seconds: float
    """Duration of the whole step."""
    rest_s: float
    """Part of `seconds` outside of the program's actions."""


def run_step(
    job: Job,
    state: TrainingState,
    work: StepInput,
    *,
    began_s: float,
    before_action: Callable[[int, Action], None],
    decide: Callable[[StepSums], float | None],
    watch: Watch | None = None,
) -> DoneStep:
    """Zero, accumulate and reduce gradients, clip them, and update. Collective.

    A step that the watch lets be computed again is recorded once, as computed last; the first
    computation counts as time outside of the program's actions.

    Args:
        job: Job that trains the run.
        state: Training state of this rank.
        work: Sequences of this replica.
        began_s: Clock (`time.perf_counter`) at the begin of the step, before its data was read.
        before_action: Called before each action of the program, with its position and the action.
        decide: Returns the learning rate of the update, or None to skip the update.
        watch: Watch for silent corruption; None if the run has none.

    Raises:
        PeerLostError: The device, which may wait for other ranks, made no progress for too long.
        CorruptionError: The device of this rank computed or kept wrong values.
    """
    device, peers = job.device, job.peers
    own = work.num_valid, sum(len(sequence.tokens_S) for sequence in work.sequences)
    speaks = job.mesh.speaks_for_replica
    num_valid, num_tokens = map(int, peers.total([count * speaks for count in own]))
    compute = partial(
        _compute, job, state, work, num_valid, num_tokens, before_action=before_action
    )
    computed = compute() if watch is None else watch.confirmed(work.number, compute)
    result, sums = computed.result, computed.sums
    every, clip_norm = job.run.train.norms_every, job.run.optimizer.clip_norm
    norms = state.norms_by_kind(peers) if every and work.number % every == 0 else None
    clipped = clip_factor(sums.norm, clip_norm=clip_norm)
    lr = decide(sums)
    loads_LX = _expert_loads(job, result)
    if lr is not None:
        if watch is not None:
            watch.check_weights(work.number)
        state.update(sums.gradients, norm=computed.norm, clip_norm=clip_norm, lr=lr)
        if loads_LX is not None:
            balance_(state.choice_biases, loads_LX, amount=job.run.routing.bias_update)
        if watch is not None:
            watch.note_weights()
    device.synchronize()
    seconds = time.perf_counter() - began_s
    copies = state.add_tier_bytes(state.engine.take_copies())
    copies = copies.without_host if device.kind == "cpu" else copies
    peaks = state.engine.take_peaks()
    rest_s = seconds - computed.actions_s
    return DoneStep(result, sums, clipped, norms, loads_LX, lr, copies, peaks, seconds, rest_s)


def _compute(
    job: Job,
    state: TrainingState,
    work: StepInput,
    num_valid: int,
    num_tokens: int,
    *,
    before_action: Callable[[int, Action], None],
) -> Computed:
    """Zero, accumulate and reduce the gradients of a step. Collective."""
    device, peers = job.device, job.peers
    state.zero_gradients()
    begin = time.perf_counter()
    result = state.engine.accumulate(
        [device.put(sequence) for sequence in work.sequences],
        work.boundaries,
        num_valid=num_valid,
        num_tokens=num_tokens,
        planned=work.planned,
        before_action=before_action,
        on_failure=job.progress.failed,
    )
    actions_s = time.perf_counter() - begin
    what = f"step {work.number}"
    state.finish_gradients(
        lambda: await_device(job, result.executed, what=what, predicted_s=work.step_s)
    )
    norm = state.norm(peers)
    (total_loss,) = peers.total([float(result.total_loss)])
    loss = total_loss / num_valid if num_valid else math.nan
    sums = StepSums(num_valid, loss, float(norm), state.sharded.owned(state.gradients))
    return Computed(result, sums, norm, actions_s)


def _expert_loads(job: Job, result: StepResult) -> Tensor | None:
    """Return the loads of the experts of all layers, of all ranks; None without experts."""
    model = job.run.model
    if model.experts is None:
        return None
    own_LX = torch.zeros(model.num_layers, model.experts.count, dtype=torch.float64)
    for layer, loads_X in result.expert_loads.items():
        own_LX[layer] = loads_X
    total = job.peers.total(own_LX.flatten().tolist())
    return torch.tensor(total, dtype=torch.float64).view_as(own_LX)


def await_device(job: Job, executed: Trace, *, what: str, predicted_s: float) -> None:
    """Wait for the work issued to this rank's device, which may wait for other ranks.

    Args:
        job: Job of this rank.
        executed: Actions whose work was issued.
        what: What the rank does, for the message.
        predicted_s: Predicted seconds of that.

    Raises:
        PeerLostError: The device made no progress for too long.
    """
    if not job.mesh.is_distributed:
        return
    limit_s = stall_timeout(job.run.parallel.timeout_s, predicted_step_s=predicted_s)
    if not job.device.wait_with_timeout(executed.marks, stall_timeout_s=limit_s):
        raise PeerLostError(
            f"{what}: waiting for this rank's device, which waits for another rank: "
            f"timed out after {limit_s:g} s{LATE}"
        )
