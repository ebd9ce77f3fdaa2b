"""Steps of samples: their work, planned while the step before runs, and corrected predictions.

Another process gets only the planner and the request, so its plan equals the one that this process
would make. If there is no plan when a step begins, this process makes it. Corrections of predicted
times by measured ones are the same on all ranks, and are saved in checkpoints.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from sppo.cost.flops import ignored_flops, sample_flops
from sppo.cost.memory.process_growth import code_bytes
from sppo.cost.memory.stage_memory import MemoryBuckets
from sppo.cost.trainable import trainable_of_run
from sppo.data.sample_rows import TrainingData
from sppo.engine.step_programs import PlannedStep
from sppo.engine.trace import ExecutedAction
from sppo.engine.unit import SequenceData
from sppo.kernels.labels import IGNORED_LABEL
from sppo.parallel.host_collectives import HostCollectives
from sppo.parallel.job.worker_process import WorkerLostError, WorkerProcess
from sppo.planning.elastic.packing import PADDING
from sppo.planning.elastic.step_correction import (
    ActionSums,
    History,
    StepCorrection,
    correction_by,
    extended,
    history_from_json,
    history_json,
    measured_step,
)
from sppo.planning.elastic.step_plan import StepPlan
from sppo.planning.elastic.step_planner import StepPlanner, plan_pickled, step_planner
from sppo.planning.plan import ExecutionPlan
from sppo.schedule.actions import ActionKind
from sppo.schedule.costs import Costs
from sppo.training.job import Job
from sppo.training.step import DoneStep, StepSource, StepWork, TakenPlan

_log = logging.getLogger(__name__)

_PROCESSES = 2
"""Number of failed processes after which no other is started."""
_SAVED = "step_correction"
"""Key of the correction history in a checkpoint's metadata."""


StepRequest = tuple[tuple[int, ...], StepCorrection | None]
"""Tokens of each sample of a step, of all replicas, and the correction of its prediction."""


class StepPlans:
    """Source of the plans of one replica's steps; must be closed at the end of the run.

    Args:
        planner: Planner of the run's steps.
        replica: Index of the replica.
        ahead: Whether another process makes plans while steps run.
        limit_s: Longest time in seconds that a step waits for that process.
        any_rank: Returns whether its argument is true on any rank. Collective.
    """

    def __init__(
        self,
        planner: StepPlanner,
        *,
        replica: int,
        ahead: bool,
        limit_s: float,
        any_rank: Callable[[bool], bool],
    ) -> None:
        self._planner, self._replica = planner, replica
        self._pickled = pickle.dumps(planner)
        self._limit_s, self._any_rank = limit_s, any_rank
        self._ahead = ahead
        self._worker = WorkerProcess() if ahead else None
        self._failures = 0
        self._begun: tuple[StepRequest, Future[StepPlan]] | None = None
        self._note = ""
        """Message on a failure since the last plan was taken; "" if none."""

    def begin(self, request: StepRequest) -> None:
        """Submit a step to the planning process; does nothing without one."""
        if self._worker is None:
            return
        try:
            future = self._worker.submit(
                plan_pickled, self._pickled, *request, replica=self._replica
            )
            self._begun = request, future
        except WorkerLostError as error:
            self._failed(str(error))

    def take(self, request: StepRequest) -> TakenPlan:
        """Return the plan of a step, equal to one made without a planning process.

        If planning exceeds the limit on any rank, all ranks plan by a smaller search instead.

        Raises:
            MemoryError: No plan fits.
        """
        start, late, found = time.perf_counter(), False, None
        begun, self._begun = self._begun, None
        future = begun[1] if begun is not None and begun[0] == request else None
        was_there = future is not None and future.done()
        if future is not None:
            try:
                found = self._result(future)
            except TimeoutError:
                late = True
                self._stop()
                self._note = (
                    f"its plan was not there after {self._limit_s:g} s (planning.limit_s), so it "
                    "is planned by a smaller search"
                )
        planner = self._planner
        if self._ahead and self._any_rank(late):
            planner, found = replace(planner, quick=True), None
        waited = found is None or not was_there
        if found is None:
            found = planner.plan_replica(*request, replica=self._replica)
        note, self._note = self._note, ""
        return TakenPlan(found, time.perf_counter() - start if waited else 0.0, note)

    def _result(self, future: Future[StepPlan]) -> StepPlan | None:
        """Return the plan from the other process; None if that process failed.

        Raises:
            TimeoutError: The plan was not ready within the limit.
        """
        assert self._worker is not None, "what was begun has a process"
        try:
            return self._worker.result(future, timeout_s=self._limit_s)
        except TimeoutError:
            raise
        except MemoryError:  # does not fit: planning here raises it again
            return None
        except WorkerLostError as error:
            self._failed(str(error))
        except Exception as error:  # of any kind: the step is planned here
            self._failed(f"failed ({type(error).__name__}: {error})")
        return None

    def _failed(self, how: str) -> None:
        """Close the failed process, and note the failure and its consequence."""
        self._failures += 1
        self._stop()
        if self._failures == _PROCESSES:
            self._worker = None
        then = "another one is started" if self._worker is not None else "so is every other step"
        self._note = (
            f"the process that plans ahead {how}: this step is planned when it begins, and {then}"
        )

    def _stop(self) -> None:
        self._begun = None
        if self._worker is not None:
            self._worker.close()

    def close(self) -> None:
        """End the planning process."""
        self._stop()
        self._worker = None


class SampleSteps(StepSource):
    """Source of steps of samples, which are divided over replicas, packed, and planned.

    Args:
        job: Job that trains the run.
        data: Samples of the run.
        plan: Plan of the run.
        metadata: Metadata of the checkpoint from which the run resumes; {} without one.
    """

    def __init__(
        self, job: Job, data: TrainingData, plan: ExecutionPlan, metadata: Mapping[str, Any]
    ) -> None:
        run, mesh, peers = job.run, job.mesh, job.peers
        self._run, self._data, self._mesh = run, data, mesh
        self._plan, self._peers = plan, peers
        self._history = saved_history(metadata, plan=plan)
        """Figures of earlier steps. Planning of a step may begin when the step before begins, so
        its correction does not rest on that step."""
        planner = step_planner(plan, background_saves=run.checkpoint.async_save)
        self._plans = StepPlans(
            replace(planner, corrects_plans=run.planning.corrected),
            replica=mesh.at.data,
            ahead=run.planning.ahead,
            # A rank that plans after the limit needs time before the other ranks time out.
            limit_s=min(run.planning.limit_s, run.parallel.timeout_s / 2),
            any_rank=peers.any,
        )
        self._lengths: set[int] = set()

    def work(self, step: int, *, consumed: int) -> StepWork:
        """Take the plan of a step, start the planning of the next, and read the samples.

        Raises:
            MemoryError: No plan fits.
        """
        samples = self._data.step_samples(consumed)
        # The last step ran while this one was planned.
        known = correction_by(self._history[:-1])
        taken = self._plans.take((self._data.lengths(samples), known))
        if step + 1 < self._run.train.steps:
            following = self._data.step_samples(consumed + len(samples))
            known = correction_by(self._history)
            self._plans.begin((self._data.lengths(following), known))
        plan = taken.plan
        own = [samples[index] for index in plan.replicas[self._mesh.at.data]]
        own_lengths = self._data.lengths(own)
        packed = [[own[i] for i in places if i != PADDING] for places in plan.packed.samples]
        sequences = [
            self._sequence(within, planned.tokens)
            for within, planned in zip(packed, plan.sequences, strict=True)
        ]
        model, trainable = self._run.model, trainable_of_run(self._run)
        tokens = sum(own_lengths)
        num_valid = sum(sequence.num_valid for sequence in sequences)
        padded = sum(len(sequence.tokens_S) for sequence in sequences)
        return StepWork(
            number=step + 1,
            sequences=sequences,
            boundaries=[sequence.boundaries for sequence in plan.sequences],
            num_valid=num_valid,
            planned=PlannedStep(plan.program, plan.placements),
            consumed=samples,
            own=packed,
            tokens=tokens,
            model_flops=sample_flops(model, own_lengths, trainable)
            - ignored_flops(model, tokens - num_valid, trainable),
            executed_flops=plan.executed_flops
            - ignored_flops(model, padded - num_valid, trainable),
            step_s=plan.predicted_s,
            phases_s=plan.phases_s,
            memory=self._memory(plan),
            samples=taken,
        )

    def _memory(self, plan: StepPlan) -> MemoryBuckets:
        """Return the predicted memory of this rank.

        Includes the code that oneDNN compiled for subsequence lengths of earlier steps, which is
        never freed.
        """
        candidate = plan.evaluated.candidate
        self._lengths.update(candidate.lengths)
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

    def learn(self, work: StepWork, done: DoneStep) -> Mapping[str, Any]:
        """Correct the predictions of steps after the next; return metrics of this step."""
        assert work.samples is not None, "every step of samples is planned"
        plan = work.samples.plan
        figures = step_figures(done, work.samples, self._peers)
        self._history = extended(self._history, figures)
        (uncorrected_s,) = self._peers.largest([plan.uncorrected.step_s])
        return {
            "uncorrected_step_s": uncorrected_s,
            "correction_steps": 0 if plan.correction is None else plan.correction.steps,
        }

    def saved(self) -> Mapping[str, Any]:
        """Return the history by which predictions are corrected."""
        return history_to_save(self._history, plan=self._plan)

    def close(self) -> None:
        """End the process that plans ahead."""
        self._plans.close()


# Measured times, by which predictions are corrected


def step_figures(done: DoneStep, taken: TakenPlan, peers: HostCollectives) -> StepCorrection:
    """Return the figures of a step over all ranks, bit-identical on each. Collective."""
    plan, trace = taken.plan, done.result.trace
    costs = plan.uncorrected.costs
    own = [
        *action_sums(trace, costs, kinds=[ActionKind.F]),
        *action_sums(trace, costs, kinds=[ActionKind.B, ActionKind.W, ActionKind.KV]),
        done.seconds - done.rest_s,
        plan.uncorrected_actions_s,
        done.rest_s - taken.wait_s,
        1.0,
    ]
    f_s, f_predicted_s, b_s, b_predicted_s, actions_s, predicted_s, rest_s, count = peers.total(own)
    return measured_step(
        (f_s, f_predicted_s),
        (b_s, b_predicted_s),
        actions=actions_s / predicted_s,
        rest_s=rest_s / count,
    )


def action_sums(
    trace: Sequence[ExecutedAction], costs: Costs, *, kinds: Collection[ActionKind]
) -> ActionSums:
    """Sum measured seconds and uncorrected costs of the actions of some kinds that a rank ran."""
    done = [one for one in trace if one.action.kind in kinds]
    halves = any(one.action.kind == ActionKind.W for one in done)
    seconds = {
        ActionKind.F: costs.forward_s,
        ActionKind.B: costs.backward_s if halves else costs.backward_s + costs.weight_s,
        ActionKind.W: costs.weight_s,
        ActionKind.KV: costs.kv_recompute_s,
    }
    # A stage runs every unit of the step.
    run = dict.fromkeys((one.action.kind, one.action.stage) for one in done)
    return (
        sum(one.finish_s - one.start_s for one in done),
        sum(float(seconds[kind][stage].sum()) for kind, stage in run),
    )


def history_to_save(history: History, *, plan: ExecutionPlan) -> dict[str, Any]:
    """Return a history as an entry of a checkpoint's metadata."""
    return {_SAVED: {"of": _key(plan), "steps": history_json(history)}}


def saved_history(metadata: Mapping[str, Any], *, plan: ExecutionPlan) -> History:
    """Return the correction history in a checkpoint's metadata.

    The history is empty if the checkpoint has none, or has one of other degrees of parallelism or
    other hardware.

    Args:
        metadata: Metadata of the checkpoint; {} without a checkpoint.
        plan: Plan of the resumed run.
    """
    saved = metadata.get(_SAVED)
    try:
        if saved is not None and saved["of"] == _key(plan):
            return history_from_json(saved["steps"])
    except (ValueError, KeyError, TypeError) as error:
        _log.warning(
            "predictions begin without correction: %s of the checkpoint: %s", _SAVED, error
        )
    return ()


def _key(plan: ExecutionPlan) -> dict[str, Any]:
    """Return the hardware and degrees of a plan; measured times apply only if these are equal."""
    hardware = plan.hardware
    return {
        "hardware": f"{hardware.name} ({hardware.provenance})",
        "data_parallel_degree": plan.data_parallel_degree,
        "pipeline_parallel_degree": plan.pipeline_parallel_degree,
        "sequence_parallel_degree": plan.sequence_parallel_degree,
        "sequence_parallel": plan.sequence_parallel,
    }
