"""One training step of a rank, the same on a GPU, on a CPU and on fake tensors."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from sppo.engine.engine import PlannedStep, StepResult
from sppo.engine.unit import SequenceData
from sppo.offload.copy_report import CopyReport
from sppo.parallel.host_collectives import HostCollectives
from sppo.schedule.actions import Action
from sppo.training.devices.device import Device
from sppo.training.state import TrainingState
from sppo.training.steps.measured import MeasuredBuckets


@dataclass(frozen=True, slots=True)
class StepSums:
    """Sums over all ranks, from which the update is decided.

    Attributes:
        num_valid: Labels that count, of all replicas.
        loss: Mean over these; NaN where there is none.
        norm: Euclidean norm of all gradients.
        gradients: Those of the rows that this rank updates, by global name.
    """

    num_valid: int
    loss: float
    norm: float
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class DoneStep:
    """Results and times of one step on this rank.

    Attributes:
        result: Of the engine.
        sums: Over all ranks.
        lr: Learning rate of the update; None where there was none.
        copies: Of offloaded tensors.
        seconds: Of the whole step.
        rest_s: Of these, without the program's actions.
    """

    result: StepResult
    sums: StepSums
    lr: float | None
    copies: CopyReport
    seconds: float
    rest_s: float


@dataclass(frozen=True, slots=True)
class StepInput:
    """Sequences that a step of one replica trains on.

    Attributes:
        sequences: Its sequences.
        boundaries: Cuts of each.
        num_valid: Labels that count in all replicas.
        planned: What was planned for this step alone; None where every step is alike.
    """

    sequences: Sequence[SequenceData]
    boundaries: Sequence[Sequence[int]]
    num_valid: int
    planned: PlannedStep | None = None


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHooks:
    """Callbacks of a step, in the order of their calls.

    Attributes:
        read: Returns what this replica trains on.
        before_action: Is given the position of each action of the program, and the action.
        on_failure: Is given what ends the program early.
        accumulated: Is called when all actions are issued.
        reduced: Is given the engine's result once all reductions are issued; returns when the
            device has got there, where that matters.
        learning_rate: Returns the learning rate of the update; None leaves the update out.
    """

    read: Callable[[], StepInput]
    before_action: Callable[[int, Action], None]
    on_failure: Callable[[BaseException], None] = _nothing
    accumulated: Callable[[], None] = _nothing
    reduced: Callable[[StepResult], None] = _nothing
    learning_rate: Callable[[StepSums], float | None]


def run_step(
    state: TrainingState,
    hooks: StepHooks,
    *,
    clip_norm: float,
    device: Device,
    peers: HostCollectives,
    buckets: MeasuredBuckets,
) -> DoneStep:
    """Zero, accumulate and reduce gradients, clip them, update, and count memory.

    Args:
        state: of this rank.
        hooks: what else is done on the way.
        clip_norm: of the gradients of all ranks; 0 leaves them alone.
        device: that this rank computes on.
        peers: all ranks.
        buckets: takes in the step's peaks.
    """
    start = time.perf_counter()
    device.reset_peak()
    state.zero_gradients()
    work = hooks.read()
    num_valid = work.num_valid
    begin = time.perf_counter()
    result = state.engine.accumulate(
        [device.put(sequence) for sequence in work.sequences],
        work.boundaries,
        num_valid=num_valid,
        planned=work.planned,
        before_action=hooks.before_action,
        on_failure=hooks.on_failure,
    )
    actions_s = time.perf_counter() - begin
    hooks.accumulated()
    state.finish_gradients(lambda: hooks.reduced(result))
    norm = state.norm(peers)
    (total_loss,) = peers.total([float(result.total_loss)])
    loss = total_loss / num_valid if num_valid else math.nan
    sums = StepSums(num_valid, loss, float(norm), state.sharded.own(state.gradients))
    lr = hooks.learning_rate(sums)
    if lr is not None:
        state.update(sums.gradients, norm=norm, clip_norm=clip_norm, lr=lr)
    device.synchronize()
    seconds = time.perf_counter() - start
    buckets.count_step(state.engine.take_peaks(), pool=device.pool())
    copies = state.tensors.with_state(state.engine.take_copies())
    buckets.count_copies(copies, host_is_device=device.kind == "cpu")
    return DoneStep(result, sums, lr, copies, seconds, seconds - actions_s)
