"""Outcome of a call of the training loop, for the report of the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from sppo.cost.memory.stage_memory import MemoryBuckets
from sppo.engine.engine import StepResult
from sppo.offload.copy_report import CopyReport
from sppo.schedule.timeline import Timeline
from sppo.training.steps.measured import MeasuredBuckets, StepPhases
from sppo.training.steps.step_work import PlannedPhases


@dataclass(slots=True)
class TrainingOutcome:
    """Steps, measurements and end of a call of :func:`sppo.training.trainer.train`."""

    output: Path
    first_step: int
    """Steps that were done before."""
    done_steps: int
    """Steps done in all."""
    interrupted_by: str | None = None
    """Name of the signal that ended the run early."""
    saved: bool = True
    """Whether a checkpoint has the state at the end."""
    wall_s: float = 0.0
    baseline_bytes: int = 0
    """Device memory that the process held before the model was built; on a CPU resident memory."""
    warm_up_bytes: int = 0
    """Memory that the process took for good before that; 0 on a GPU."""
    peak_bytes: int = 0
    """Most device memory in any step."""
    phases: list[StepPhases] = field(default_factory=list)
    """One entry per step of this process."""
    buckets: MeasuredBuckets = field(default_factory=MeasuredBuckets)
    copies: list[CopyReport] = field(default_factory=list)
    """One entry per step of this process."""
    last_step: StepResult | None = None
    """Actions that this rank executed in its last step, with their times."""
    planned_phases: list[PlannedPhases] = field(default_factory=list)
    """Predicted seconds, one entry per step of this process."""
    most_planned: MemoryBuckets | None = None
    """Predicted memory of the step with most."""
    timeline: Timeline | None = None
    """The last step of a pipeline of ranks; on rank 0."""
    planned_timeline: Timeline | None = None
    """Simulated timeline of the last step."""
    exposed_copy_s: tuple[float, ...] = ()
    """Seconds that each rank of the pipeline waited for copies in the last step."""
