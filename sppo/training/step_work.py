"""Work of each step of a run, and its source; here for sequences of fixed length."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sppo.cost.flops import step_flops
from sppo.cost.memory.stage_memory import MemoryBuckets
from sppo.cost.stage_cost import executed_flops
from sppo.data.sample_rows import TrainingData
from sppo.planning.plan import ExecutionPlan
from sppo.training.job import Job
from sppo.training.step import DoneStep, StepInput

if TYPE_CHECKING:
    from sppo.training.planning_ahead import TakenPlan

Phases = tuple[float, float, float]
"""Seconds of the forwards, of the backwards, and of the rest of a step: reading data, reducing
gradients over ranks, clipping and the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork(StepInput):
    """Work of one step of one replica: its data, plan and predictions."""

    consumed: Sequence[int]
    """Numbers of the sequences, or samples, that all replicas consume."""
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
        run, mesh = job.run, job.ranks.mesh
        self._data, self._plan, self._mesh = data, plan, mesh
        self._count = run.train.sequences_per_step // mesh.shape.data_parallel
        length, predicted = run.sequence.length, plan.predicted
        self._same: dict[str, Any] = {
            "boundaries": [plan.boundaries] * self._count,
            "tokens": self._count * length,
            "model_flops": step_flops(run.model, length=length, sequences=self._count),
            "executed_flops": executed_flops(plan.candidate(), plan.placement()),
            "step_s": predicted.step_s,
            "phases_s": (predicted.forward_s, predicted.backward_s, predicted.update_s),
            "memory": plan.rank_memory[mesh.at.pipeline].device,
        }
        """Fields of the work that are the same in all steps."""

    def work(self, step: int, *, consumed: int) -> StepWork:
        """Return the work of a step."""
        indices = self._data.step_samples(consumed)
        first = self._mesh.at.data * self._count
        own = [self._data.row([index]) for index in indices[first : first + self._count]]
        num_valid = sum(sequence.num_valid for sequence in own)
        return StepWork(
            number=step + 1, sequences=own, num_valid=num_valid, consumed=indices, **self._same
        )
