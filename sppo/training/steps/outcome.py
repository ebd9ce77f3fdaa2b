"""Outcome of one call of the training loop, for the report of the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from sppo.cost.memory.stage_memory import MemoryBuckets
from sppo.engine.engine import StepResult
from sppo.offload.copy_report import CopyReport
from sppo.training.executed_step import StepTimelines
from sppo.training.steps.measured import MeasuredBuckets, StepPhases
from sppo.training.steps.step import DoneStep
from sppo.training.steps.work import StepWork


@dataclass(frozen=True, slots=True)
class Baseline:
    """State of a rank's device before the model is built.

    Attributes:
        held_bytes: Device memory that the process holds after the warm-up; on a CPU, resident
            memory.
        warm_up_bytes: Part of `held_bytes` that the warm-up allocated permanently; 0 on a GPU.
        file_bytes: Resident pages of files before the warm-up; 0 on a GPU.
        capacity_bytes: Device memory that the process may use in total.
        peak_flops_per_s: Measured FLOPs per second of matrix products on this device; None on a
            CPU.
    """

    held_bytes: int = 0
    warm_up_bytes: int = 0
    file_bytes: int = 0
    capacity_bytes: int = 0
    peak_flops_per_s: float | None = None


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
    saved: bool = True
    """True if the state at the end is in a checkpoint."""
    wall_s: float = 0.0
    file_bytes: int = 0
    """Growth of the resident pages of libraries since the beginning of the warm-up; on a CPU."""
    peak_bytes: int = 0
    """Largest device memory held by this rank in any step."""
    phases: list[StepPhases] = field(default_factory=list)
    """Measured seconds by phase, one entry per step of this call."""
    buckets: MeasuredBuckets = field(default_factory=MeasuredBuckets)
    """Measured peaks of memory by bucket."""
    copies: list[CopyReport] = field(default_factory=list)
    """Copies of this rank, one entry per step of this call."""
    planned_phases: list[StepPhases] = field(default_factory=list)
    """Predicted seconds by phase, one entry per step of this call."""
    most_planned: MemoryBuckets | None = None
    """Predicted memory of the step that is predicted to need most."""
    last_work: StepWork | None = None
    """Work of the last step of this call; None before the first."""
    last_step: StepResult | None = None
    """Actions that this rank executed in its last step, with their times."""
    timelines: StepTimelines | None = None
    """Timelines of the last step of the first pipeline; None except on rank 0."""

    def add(self, work: StepWork, done: DoneStep, phases: StepPhases, *, peak_bytes: int) -> None:
        """Add a step: its copies, phases and peaks, and as planned.

        Args:
            work: Work of the step.
            done: Results of the step on this rank.
            phases: Seconds by phase, of the slowest rank.
            peak_bytes: Device memory that this rank held.
        """
        self.last_work, self.last_step = work, done.result
        self.copies.append(done.copies)
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        self.phases.append(phases)
        self.planned_phases.append(work.phases)
        most = self.most_planned
        if most is None or work.memory.total_bytes > most.total_bytes:
            self.most_planned = work.memory
