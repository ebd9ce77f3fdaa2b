"""Outcome of a call of training: its steps, its end, and memory by bucket, planned and measured."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from sppo.cost.memory.process_growth import POOL_FREE_BYTES
from sppo.cost.memory.stage_memory import MemoryBuckets
from sppo.engine.engine import EnginePeaks, StepResult
from sppo.offload.copy_report import CopyReport
from sppo.report.expert_load import Loads
from sppo.report.validation import Progress
from sppo.training.devices.cpu_device import PoolUse
from sppo.training.records.executed_step import StepTimelines
from sppo.training.state import TrainingState
from sppo.training.step import DoneStep, Phases, StepWork


@dataclass(frozen=True, slots=True)
class Baseline:
    """State of a rank's device before the model is built."""

    held_bytes: int = 0
    """Device memory that the process holds after the warm-up; on a CPU, resident memory."""
    warm_up_bytes: int = 0
    """Part of `held_bytes` that the warm-up allocated permanently; 0 on a GPU."""
    file_bytes: int = 0
    """Resident pages of files before the warm-up; 0 on a GPU."""
    capacity_bytes: int = 0
    """Device memory that the process may use in total."""
    peak_flops_per_s: float | None = None
    """Measured FLOPs per second of matrix products on this device; None on a CPU."""


@dataclass(slots=True)
class MeasuredBuckets:
    """Peaks of device memory in bytes, by memory bucket."""

    weights_bytes: int = 0
    """Bytes of the weights that stay on the device."""
    gradients_bytes: int = 0
    """Bytes of the gradients that stay on the device."""
    optimizer_bytes: int = 0
    kv_bytes: int = 0
    activations_bytes: int = 0
    gathered_bytes: int = 0
    """Bytes of weights that are gathered while in use."""
    whole_gradients_bytes: int = 0
    """Bytes of gradients that are whole until they are reduced."""
    copies_bytes: int = 0
    """Bytes of the slots that offloaded tensors pass through."""
    working_bytes: int | None = None
    """Bytes of the working set; None if tensors are in the C heap, which does not count them."""
    free_bytes: int = 0
    """Bytes that the pool of the allocator has from the system beyond those of tensors."""

    def count_state(self, state: TrainingState) -> None:
        """Count the weights, gradients and optimizer states that stay on the device."""
        self.weights_bytes, self.gradients_bytes, self.optimizer_bytes = state.device_bytes

    def count_step(self, peaks: EnginePeaks, *, copies_bytes: int, pool: PoolUse | None) -> None:
        """Raise the peaks of the buckets to those of one step.

        Args:
            peaks: Peaks that the engine counted.
            copies_bytes: Bytes of the slots on the device.
            pool: Use of the allocator's pool at the end of the step. The working set is its peak
                less its use at the end and less the bytes that the engine counts. None if the
                allocator does not count its use.
        """
        self.kv_bytes = max(self.kv_bytes, peaks.kv_bytes)
        self.activations_bytes = max(self.activations_bytes, peaks.activations_bytes)
        self.gathered_bytes = max(self.gathered_bytes, peaks.gathered_bytes)
        self.whole_gradients_bytes = max(self.whole_gradients_bytes, peaks.whole_gradients_bytes)
        self.copies_bytes = max(self.copies_bytes, copies_bytes)
        if pool is not None:
            counted = peaks.pooled_activations_bytes + peaks.gathered_bytes
            counted += peaks.whole_gradients_bytes
            working = pool.used_peak_bytes - pool.used_bytes - counted
            self.working_bytes = max(self.working_bytes or 0, working)
            if pool.resident_peak_bytes is not None:
                free = pool.resident_peak_bytes - pool.used_peak_bytes
                self.free_bytes = max(self.free_bytes, free)


@dataclass(slots=True)
class TrainingOutcome:
    """Steps, measurements and end of one call of :func:`sppo.training.trainer.train`."""

    output: Path
    base: Baseline
    """State of the device before the model was built."""
    first_step: int
    """Number of steps done before this call."""
    done_steps: int
    """Number of steps done in total, those before this call included."""
    interrupted_by: str | None = None
    """Signal, or write error, that ended the run early; None if the run was not interrupted."""
    stopped_early: str | None = None
    """Why the run ended before its last step, if its validations no longer improved."""
    saved: bool = True
    """True if the state at the end is in a checkpoint."""
    wall_s: float = 0.0
    file_bytes: int = 0
    """Growth of the resident pages of libraries since the beginning of the warm-up; on a CPU."""
    peak_bytes: int = 0
    """Largest device memory held by this rank in any step."""
    phases_s: list[Phases] = field(default_factory=list)
    """Measured seconds by phase, of the slowest rank, one entry per step of this call."""
    planned_phases_s: list[Phases] = field(default_factory=list)
    """Predicted seconds by phase, one entry per step of this call."""
    buckets: MeasuredBuckets = field(default_factory=MeasuredBuckets)
    """Measured peaks of memory by bucket."""
    most_planned: MemoryBuckets | None = None
    """Predicted memory of the step that is predicted to need most."""
    validation_s: list[float] = field(default_factory=list)
    """Measured seconds of each validation of this call."""
    validation_peak_bytes: int = 0
    """Largest device memory held by this rank in any validation."""
    progress: Progress | None = None
    """Best validation so far; None if this call made none."""
    copies: list[CopyReport] = field(default_factory=list)
    """Copies of this rank, one entry per step of this call."""
    expert_loads: Loads | None = None
    """Tokens of all steps of this call that chose each expert; None without experts."""
    last_work: StepWork | None = None
    """Work of the last step of this call; None before the first."""
    last_step: StepResult | None = None
    """Actions that this rank executed in its last step, with their times."""
    timelines: StepTimelines | None = None
    """Timelines of the last step of the first pipeline; None except on rank 0."""

    def add(self, work: StepWork, done: DoneStep, phases_s: Phases, *, peak_bytes: int) -> None:
        """Add a step: its copies, phases and peak, and as planned."""
        self.last_work, self.last_step = work, replace(done.result, losses=())
        self.copies.append(done.copies)
        if done.expert_loads_LX is not None:
            loads = done.expert_loads_LX.numpy()
            self.expert_loads = loads if self.expert_loads is None else self.expert_loads + loads
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        self.phases_s.append(phases_s)
        self.planned_phases_s.append(work.phases_s)
        most = self.most_planned
        if most is None or work.memory.total_bytes > most.total_bytes:
            self.most_planned = work.memory

    def add_validation(self, seconds: float, *, peak_bytes: int, progress: Progress) -> None:
        """Add a validation: its time, its peak of memory, and the best one so far."""
        self.validation_s.append(seconds)
        self.validation_peak_bytes = max(self.validation_peak_bytes, peak_bytes)
        self.progress = progress


def predicted_and_measured(
    predicted: MemoryBuckets, measured: MeasuredBuckets, *, all_bytes: int
) -> dict[str, tuple[int, int]]:
    """Return (predicted, measured) bytes by bucket, as far as the device can separate buckets.

    Args:
        predicted: Predicted memory buckets.
        measured: Peaks of the buckets over all steps.
        all_bytes: Peak memory of the process, less what it held before it trained, and less pages
            of libraries, which the system shares and can drop.
    """
    found = {
        "weights": (predicted.weights_bytes, measured.weights_bytes + measured.gathered_bytes),
        "gradients": (
            predicted.gradients_bytes,
            measured.gradients_bytes + measured.whole_gradients_bytes,
        ),
        "optimizer": (predicted.optimizer_bytes, measured.optimizer_bytes),
        "K/V and gradients": (predicted.kv_bytes + predicted.kv_gradients_bytes, measured.kv_bytes),
        "activations": (
            predicted.activations_bytes + predicted.loss_gradient_bytes,
            measured.activations_bytes,
        ),
    }
    if predicted.copies_bytes or measured.copies_bytes:
        found["copies"] = (predicted.copies_bytes, measured.copies_bytes)
    counted_bytes = sum(measured_bytes for _, measured_bytes in found.values())
    counted_bytes += (measured.working_bytes or 0) + measured.free_bytes
    # Negative where the system took back pages that count as held in a bucket.
    rest_bytes = max(0, all_bytes - counted_bytes)
    # Buffers of messages and exchanged tensors cannot be separated from the working set.
    working_bytes = predicted.working_bytes + predicted.communication_bytes
    if measured.working_bytes is None:
        found["working set and process growth"] = (
            working_bytes + predicted.growth_bytes,
            rest_bytes,
        )
    else:
        # The plan counts an allowance for free memory of a pool as growth of the process.
        allowance = POOL_FREE_BYTES if measured.free_bytes else 0
        found["working set"] = (working_bytes, measured.working_bytes)
        found["process growth"] = (predicted.growth_bytes - allowance, rest_bytes)
        if allowance:
            found["free in the pool"] = (allowance, measured.free_bytes)
    # Torch does not count the memory that NCCL allocates.
    found["all"] = (predicted.total_bytes - predicted.communicators_bytes, all_bytes)
    return found
