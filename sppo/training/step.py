"""One training step of a rank, and the steps that are skipped for NaN or infinity.

A step is the same on a GPU, on a CPU and on fake tensors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sppo.config import RunConfig
from sppo.engine.engine import EnginePeaks, StepResult
from sppo.engine.step_programs import PlannedStep
from sppo.engine.unit import SequenceData
from sppo.offload.copy_report import CopyReport
from sppo.parallel.host_collectives import HostCollectives
from sppo.parallel.job.peer_errors import LATE, PeerLostError
from sppo.parallel.job.timeouts import device_timeouts
from sppo.schedule.actions import Action
from sppo.training.job import Job
from sppo.training.state import TrainingState

_NAMED = 4


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


@dataclass(frozen=True, slots=True)
class StepSums:
    """Loss and gradients of a step, reduced over all ranks, from which its update is decided."""

    num_valid: int
    """Number of valid labels of all replicas."""
    loss: float
    """Mean loss over these labels; NaN if there is none."""
    norm: float
    """Euclidean norm of the gradients of all ranks."""
    gradients: Mapping[str, Tensor]
    """Gradients of the rows that this rank updates, by global name."""


@dataclass(frozen=True, slots=True)
class DoneStep:
    """Results and times of one step on this rank."""

    result: StepResult
    sums: StepSums
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
) -> DoneStep:
    """Zero, accumulate and reduce gradients, clip them, and update. Collective.

    Args:
        job: Job that trains the run.
        state: Training state of this rank.
        work: Sequences of this replica.
        began_s: Clock (`time.perf_counter`) at the begin of the step, before its data was read.
        before_action: Called before each action of the program, with its position and the action.
        decide: Returns the learning rate of the update, or None to skip the update.

    Raises:
        PeerLostError: The device, which may wait for other ranks, made no progress for too long.
    """
    device, peers = job.device, job.ranks.peers
    (num_valid,) = map(int, peers.total([work.num_valid * job.ranks.mesh.speaks_for_replica]))
    state.zero_gradients()
    begin = time.perf_counter()
    result = state.engine.accumulate(
        [device.put(sequence) for sequence in work.sequences],
        work.boundaries,
        num_valid=num_valid,
        planned=work.planned,
        before_action=before_action,
        on_failure=job.ranks.progress.failed,
    )
    actions_s = time.perf_counter() - begin
    state.finish_gradients(lambda: _await_device(job, work, result))
    norm = state.norm(peers)
    (total_loss,) = peers.total([float(result.total_loss)])
    loss = total_loss / num_valid if num_valid else math.nan
    sums = StepSums(num_valid, loss, float(norm), state.sharded.owned_rows(state.gradients))
    lr = decide(sums)
    if lr is not None:
        clip_norm = job.run.optimizer.clip_norm
        state.update(sums.gradients, norm=norm, clip_norm=clip_norm, lr=lr)
    device.synchronize()
    seconds = time.perf_counter() - began_s
    copies = state.add_tier_bytes(state.engine.take_copies())
    copies = copies.without_host if device.kind == "cpu" else copies
    peaks = state.engine.take_peaks()
    return DoneStep(result, sums, lr, copies, peaks, seconds, seconds - actions_s)


def _await_device(job: Job, work: StepInput, result: StepResult) -> None:
    """Wait for the work issued to this rank's device, which may wait for other ranks.

    Raises:
        PeerLostError: The device made no progress for too long.
    """
    if not job.ranks.mesh.is_distributed:
        return
    limit_s = device_timeouts(
        job.run.parallel.timeout_s, predicted_step_s=work.step_s
    ).stall_timeout_s
    if not job.device.wait_with_timeout(result.executed.marks, stall_timeout_s=limit_s):
        raise PeerLostError(
            f"step {work.number}: waiting for this rank's device, which waits for another rank: "
            f"timed out after {limit_s:g} s{LATE}"
        )


class NonFiniteError(RuntimeError):
    """Training stopped because losses, gradients or the state were not finite."""


class NonFiniteGuard:
    """Decides for each step whether its update may be applied.

    Args:
        run: Run configuration, with the limit on steps in a row whose updates are skipped.
        peers: Collectives over all ranks, which decide together.
    """

    def __init__(self, run: RunConfig, peers: HostCollectives) -> None:
        self._peers = peers
        self._limit = 0 if run.train.nonfinite == "stop" else run.train.max_nonfinite_steps
        self._in_a_row = 0

    @property
    def failing(self) -> bool:
        """True if the last step was not finite."""
        return self._in_a_row > 0

    def problem(self, step: int, sums: StepSums) -> str | None:
        """Return why the update of a step must be skipped; None if loss and norm are finite.

        Args:
            step: Number of the step, counted from 1.
            sums: Loss and gradients of the step.

        Raises:
            NonFiniteError: More steps in a row were not finite than allowed.
        """
        if math.isfinite(sums.loss) and math.isfinite(sums.norm):
            self._in_a_row = 0
            return None
        self._in_a_row += 1
        told = self._peers.all_gather(nonfinite_names(sums.gradients))
        bad = sorted({name for names in told for name in names})
        where = f"not finite in the gradients of {first_of(bad)}"
        culprits = where if bad else "every gradient is finite"
        report = f"step {step}: loss {sums.loss}, gradient norm {sums.norm}; {culprits}"
        if self._in_a_row > self._limit:
            raise NonFiniteError(
                f"{report}. {self._in_a_row} such steps in a row, train.max_nonfinite_steps and "
                f"train.nonfinite allow {self._limit}. Earlier checkpoints are untouched; start "
                "anew in another train.output with a lower optimizer.lr, longer "
                "optimizer.warmup_steps, or train.dtype=fp32"
            )
        return f"{report}. The update is skipped"


def nonfinite_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that have NaN or infinite values."""
    return [name for name, tensor in tensors.items() if not is_finite(tensor)]


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite.

    NaN and infinity show in the minimum and maximum, which need no temporary memory.
    """
    return all(bool(torch.isfinite(extreme)) for extreme in tensor.aminmax())


def first_of(names: Sequence[str]) -> str:
    """Return the first few of some names as text, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
