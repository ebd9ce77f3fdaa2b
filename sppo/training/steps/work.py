"""Work of each step of a run, with its plan: sequences of fixed length, or samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sppo.cost.flops import sample_flops, step_flops
from sppo.cost.memory.process_growth import code_bytes
from sppo.cost.memory.stage_memory import MemoryBuckets
from sppo.cost.stage_cost import executed_flops
from sppo.data.sample_rows import TrainingData
from sppo.engine.step_programs import PlannedStep
from sppo.engine.unit import SequenceData
from sppo.kernels.labels import IGNORED_LABEL
from sppo.planning.elastic.packing import PADDING
from sppo.planning.elastic.replica_plan import StepRequest
from sppo.planning.elastic.step_correction import CorrectionHistory, StepCorrection
from sppo.planning.elastic.step_plan import StepPlan, step_planner
from sppo.planning.plan import ExecutionPlan
from sppo.planning.simulated_run import simulated_plan
from sppo.schedule.program import Case
from sppo.training.job import Job
from sppo.training.steps.corrections import Corrections, saved_history
from sppo.training.steps.measured import StepPhases
from sppo.training.steps.planning_ahead import StepPlans, TakenPlan
from sppo.training.steps.step import DoneStep, StepInput


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork(StepInput):
    """Work of one step of one replica: its data, plan and predictions.

    Attributes:
        consumed: Numbers of the sequences, or samples, that all replicas consume.
        tokens: Number of tokens of this replica, without padding.
        model_flops: Model FLOPs of this replica's step.
        executed_flops: FLOPs of this replica's step, recomputation included.
        phases: Predicted seconds by phase.
        memory: Predicted memory of this rank's device.
        samples: Plan of this step of samples; None if all steps are alike.
    """

    consumed: Sequence[int]
    tokens: int
    model_flops: int
    executed_flops: int
    phases: StepPhases
    memory: MemoryBuckets
    samples: TakenPlan | None = None


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

    @abstractmethod
    def why_no_labels(self, step: int, *, consumed: int) -> str:
        """Return why a step has no valid label; called only for such a step."""

    @abstractmethod
    def case(self, last: StepWork) -> Case:
        """Return the program of a step and its costs."""

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
        self._tokens = self._count * length
        self._model_flops = step_flops(run.model, length=length, sequences=self._count)
        self._executed_flops = executed_flops(plan.candidate(), plan.placement())
        self._phases = StepPhases(predicted.forward_s, predicted.backward_s, predicted.update_s)

    def work(self, step: int, *, consumed: int) -> StepWork:
        """Return the work of a step."""
        indices = self._data.step_samples(consumed)
        first = self._mesh.at.data * self._count
        own = [self._data.row([index]) for index in indices[first : first + self._count]]
        return StepWork(
            number=step + 1,
            sequences=own,
            boundaries=[self._plan.boundaries] * len(own),
            num_valid=sum(sequence.num_valid for sequence in own),
            consumed=indices,
            tokens=self._tokens,
            model_flops=self._model_flops,
            executed_flops=self._executed_flops,
            step_s=self._plan.predicted.step_s,
            phases=self._phases,
            memory=self._plan.rank_memory[self._mesh.at.pipeline].device,
        )

    def why_no_labels(self, step: int, *, consumed: int) -> str:
        """Return why a step has no valid label; called only for such a step."""
        return self._data.why_no_labels(consumed)

    def case(self, last: StepWork) -> Case:
        """Return the program of a step and its costs, the same for all steps."""
        return simulated_plan(self._plan).case


class SampleSteps(StepSource):
    """Source of steps of samples, which are divided over replicas, packed, and planned."""

    def __init__(
        self, job: Job, data: TrainingData, plan: ExecutionPlan, history: CorrectionHistory
    ) -> None:
        run, ranks = job.run, job.ranks
        self._run, self._data, self._mesh = run, data, ranks.mesh
        self._corrections = Corrections(history, plan=plan, peers=ranks.peers)
        self._plans = StepPlans(
            step_planner(plan, background_saves=run.checkpoint.async_save),
            replica=ranks.mesh.at.data,
            ahead=run.planning.ahead,
            # A rank that plans after the limit needs time before the other ranks time out.
            limit_s=min(run.planning.limit_s, run.parallel.timeout_s / 2),
            any_rank=ranks.peers.any,
        )
        self._lengths: set[int] = set()

    def work(self, step: int, *, consumed: int) -> StepWork:
        """Take the plan of a step, start the planning of the next, and read the samples.

        Raises:
            MemoryError: No plan fits.
        """
        samples = self._data.step_samples(consumed)
        taken = self._plans.take(self._request(samples, self._corrections.current))
        if step + 1 < self._run.train.steps:
            following = self._data.step_samples(consumed + len(samples))
            self._plans.begin(self._request(following, self._corrections.following))
        plan, prediction = taken.replica.plan, taken.replica.prediction
        own = [samples[index] for index in taken.replica.replicas[self._mesh.at.data]]
        own_lengths = self._data.lengths(own)
        self._lengths.update(plan.evaluated.candidate.lengths)
        sequences = [
            self._sequence([own[index] for index in packed if index != PADDING], planned.tokens)
            for packed, planned in zip(plan.packed.samples, plan.sequences, strict=True)
        ]
        return StepWork(
            number=step + 1,
            sequences=sequences,
            boundaries=[sequence.boundaries for sequence in plan.sequences],
            num_valid=sum(sequence.num_valid for sequence in sequences),
            planned=PlannedStep(plan.program, plan.placements),
            consumed=samples,
            tokens=sum(own_lengths),
            model_flops=sample_flops(self._run.model, own_lengths),
            executed_flops=plan.executed_flops,
            step_s=prediction.step_s,
            phases=StepPhases(*prediction.phases_s),
            memory=self._memory(plan),
            samples=taken,
        )

    def _request(self, samples: Sequence[int], correction: StepCorrection) -> StepRequest:
        return StepRequest(
            self._data.lengths(samples), correction, corrects_plan=self._run.planning.corrected
        )

    def _memory(self, plan: StepPlan) -> MemoryBuckets:
        """Return the predicted memory of this rank.

        Includes the code that oneDNN compiled for subsequence lengths of earlier steps, which is
        never freed.
        """
        candidate = plan.evaluated.candidate
        device = plan.evaluated.memory[self._mesh.at.pipeline].device
        taken = code_bytes(candidate.workload, lengths=self._lengths)
        taken -= code_bytes(candidate.workload, lengths=candidate.lengths)
        return replace(device, growth_bytes=device.growth_bytes + taken)

    def _sequence(self, samples: Sequence[int], tokens: int) -> SequenceData:
        """Read the samples of one packed sequence, and pad it to `tokens` tokens."""
        row = self._data.row(samples)
        missing = tokens - row.tokens_S.shape[0]
        if not missing:
            return row
        return SequenceData(
            torch.cat([row.tokens_S, row.tokens_S.new_zeros(missing)]),
            torch.cat([row.labels_S, row.labels_S.new_full((missing,), IGNORED_LABEL)]),
            (*row.document_starts, tokens - missing),
        )

    def why_no_labels(self, step: int, *, consumed: int) -> str:
        """Return why a step has no valid label; called only for such a step."""
        return self._data.why_no_labels(consumed)

    def case(self, last: StepWork) -> Case:
        """Return the program of a step and its costs."""
        assert last.samples is not None, "every step of samples is planned"
        plan = last.samples.replica.plan
        return Case(plan.program, plan.evaluated.costs)

    def learn(self, work: StepWork, done: DoneStep) -> Mapping[str, Any]:
        """Correct the predictions of steps after the next; return metrics of this step."""
        assert work.samples is not None, "every step of samples is planned"
        return self._corrections.learn(done, work.samples)

    def saved(self) -> Mapping[str, Any]:
        """Return the history by which predictions are corrected."""
        return self._corrections.saved()

    def close(self) -> None:
        """End the process that plans ahead."""
        self._plans.close()


def step_source(
    job: Job,
    data: TrainingData,
    plan: ExecutionPlan,
    metadata: Mapping[str, Any],
) -> StepSource:
    """Return the source of this rank's steps; the caller closes it at the end of the run.

    Args:
        job: Job that trains the run.
        data: Training data of the run.
        plan: Plan of the run.
        metadata: Metadata of the checkpoint from which the run resumes; {} without one.
    """
    if job.run.data.samples == "documents":
        return SampleSteps(job, data, plan, saved_history(metadata, plan=plan))
    return SequenceSteps(job, data, plan)
