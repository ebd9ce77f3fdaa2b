"""The training loop: runs optimizer steps one after another, and saves checkpoints regularly.

A step reads its sequences, accumulates their gradients through the engine, clips them, updates the
weights, and reports. The work of a step follows from its number and the state in the checkpoint, so
a resumed run continues bit for bit.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

from sppo.optim.learning_rate import learning_rate
from sppo.report.metrics import StepMetrics
from sppo.schedule.actions import Action
from sppo.schedule.schedule import Schedule
from sppo.training.interruption import Interrupted, StopRequest
from sppo.training.job import Job
from sppo.training.outcome import TrainingOutcome
from sppo.training.run_checkpoints import RunCheckpoints
from sppo.training.state import TrainingState
from sppo.training.step_metrics import measure_step
from sppo.training.step_records import StepRecords
from sppo.training.steps.nonfinite import NonFiniteError, NonFiniteGuard
from sppo.training.steps.step import StepSums, run_step
from sppo.training.steps.step_work import StepSource, StepWork

AUTOMATIC_S = 600.0
"""Least seconds of training from one checkpoint to the next with ``checkpoint.every=auto``."""
SAVING_SHARE = 0.05
"""Largest share of the time that automatic checkpoints take; they are rarer if saving is slow."""
_START_ANEW = (
    "earlier checkpoints are untouched: start anew in another train.output with a lower "
    "optimizer.lr, longer optimizer.warmup_steps, or train.dtype=fp32"
)


class StepTooLargeError(MemoryError):
    """A step of samples does not fit in memory; the state before that step is saved."""


class StepLoop:
    """The steps that one call of :func:`sppo.training.trainer.train` runs.

    Args:
        job: Job that trains the run.
        state: Training state of this rank.
        outcome: Outcome of the run, updated after each step.
        checkpoints: Checkpoints of the run.
        source: Source of the work of each step.
        schedule: Schedule of every step; in a run of samples, of a step of the longest samples.
        consumed: Number of sequences, or samples, that all earlier steps consumed.
    """

    def __init__(
        self,
        job: Job,
        state: TrainingState,
        outcome: TrainingOutcome,
        *,
        checkpoints: RunCheckpoints,
        source: StepSource,
        schedule: Schedule,
        consumed: int,
    ) -> None:
        run, ranks = job.run, job.ranks
        self._job, self._run, self._ranks, self._peers = job, run, ranks, ranks.peers
        self._state, self._outcome = state, outcome
        self._checkpoints, self._records = checkpoints, StepRecords(job, outcome)
        self._source, self._schedule, self._consumed = source, schedule, consumed
        self._guard = NonFiniteGuard(
            stop_at_once=run.train.nonfinite == "stop", limit=run.train.max_nonfinite_steps
        )
        ranks.check_same("schedule", schedule.digest())
        ranks.progress.note(
            step=outcome.first_step,
            position=0,
            action="",
            num_actions=len(schedule.programs[ranks.mesh.at.pipeline]),
        )
        self._stopped_by: str | None = None
        self._saved_step, self._saved_at, self._saving_s = outcome.first_step, time.monotonic(), 0.0

    def run(self) -> None:
        """Run all remaining steps; save when interrupted, and at the end unless disabled.

        Raises:
            NonFiniteError: Too many steps in a row were not finite, or the state at the end is not.
            StepTooLargeError: A step of samples does not fit; the state before it is saved.
            OSError: A step could not be recorded; the state is saved.
        """
        outcome, total = self._outcome, self._run.train.steps
        with self._records.opened(), StopRequest() as stop:
            try:
                for step in range(outcome.first_step, total):
                    if self._agree_to_go_on(stop):
                        self._save()
                    metrics = self._step(step, stop)
                    outcome.done_steps = step + 1
                    self._records.record(metrics)
                    self._save_if_due(step + 1)
            except Interrupted:
                outcome.interrupted_by = stop.signal_name or self._stopped_by
                done = f"saving after step {outcome.done_steps}"
                self._records.say(f"{outcome.interrupted_by}: {done}")
            except StepTooLargeError:
                self._save()
                self._checkpoints.wait()
                raise
            except NonFiniteError:
                self._save_if_first()
                self._checkpoints.wait()
                raise
            outcome.saved = self._saves_now()
            unsaved = self._save() if outcome.saved else None
            self._checkpoints.wait()
        if unsaved is not None:
            raise NonFiniteError(f"{unsaved}; {_START_ANEW}")
        self._agree_that_all_is_recorded()

    def _agree_to_go_on(self, stop: StopRequest) -> bool:
        """Return whether a checkpoint is due by the clock of rank 0, on all ranks.

        Raises:
            Interrupted: A rank received a signal, or failed to record a step.
        """
        reason = stop.signal_name
        if self._records.failure is not None:
            reason = f"{self._records.failure.filename}: {self._records.failure.strerror}"
        told = self._peers.all_gather((reason, self._is_due_by_time()))
        named = [name for name, _ in told if name is not None]
        if named:
            self._stopped_by = named[0]
            raise Interrupted(named[0])
        return told[0][1]

    def _is_due_by_time(self) -> bool:
        """Return whether an automatic checkpoint is due by the clock of this rank."""
        if self._run.checkpoint.every != "auto" or self._guard.failing:
            return False
        waited_s = time.monotonic() - self._saved_at
        is_new = self._outcome.done_steps > self._saved_step
        return is_new and waited_s >= max(AUTOMATIC_S, self._saving_s / SAVING_SHARE)

    def _agree_that_all_is_recorded(self) -> None:
        """Raise on every rank the first error that kept any rank from recording a step."""
        told = self._peers.all_gather(self._records.failure)
        faults = [fault for fault in told if fault is not None]
        if faults:
            done, total = self._outcome.done_steps, self._run.train.steps
            faults[0].add_note(
                f"all {total} steps are done and saved, the record of the last is missing"
                if done == total
                else f"the state after step {done} of {total} is saved; free some space, and the "
                "same command goes on"
            )
            raise faults[0]

    def _step(self, step: int, stop: StopRequest) -> StepMetrics:
        """Run step number ``step``, counted from 0."""
        progress, alone = self._ranks.progress, not self._ranks.mesh.is_distributed
        display, device = self._records.display, self._job.device
        began_s = time.perf_counter()
        device.reset_peak()
        work = self._agreed_work(step)
        program = work.planned.program if work.planned else self._schedule
        display.step_begins(num_actions=len(program.programs[self._ranks.mesh.at.pipeline]))

        def before_action(position: int, action: Action) -> None:
            if alone:
                stop.check()
            progress.note(step=work.number, position=position, action=str(action))
            display.action()

        done = run_step(
            self._job,
            self._state,
            work,
            began_s=began_s,
            before_action=before_action,
            decide=lambda sums: self._learning_rate(step, sums),
        )
        copies_bytes = done.copies.device_bytes
        self._outcome.buckets.count_step(done.peaks, copies_bytes=copies_bytes, pool=device.pool())
        self._consumed += len(work.consumed)
        return measure_step(
            self._job,
            self._outcome,
            work,
            done,
            lr=self._scheduled_lr(step),
            learnt=self._source.learn(work, done),
        )

    def _learning_rate(self, step: int, sums: StepSums) -> float | None:
        """Return the learning rate of a step; print why and return None to skip the update."""
        if sums.num_valid:
            problem = self._guard.problem(
                step=step + 1,
                loss=sums.loss,
                norm=sums.norm,
                gradients=sums.gradients,
                all_gather=self._names,
            )
        else:
            why = self._source.why_no_labels(step, consumed=self._consumed)
            problem = f"step {step + 1}: {why}. The update is skipped"
        if problem is None:
            return self._scheduled_lr(step)
        self._records.say(problem)
        return None

    def _scheduled_lr(self, step: int) -> float:
        return learning_rate(step, config=self._run.optimizer, total_steps=self._run.train.steps)

    def _agreed_work(self, step: int) -> StepWork:
        """Return the work of a step; print the problems of planning it, of any rank.

        Raises:
            ValueError: Ranks divided the samples differently, or ranks of one replica made
                different plans.
            StepTooLargeError: On every rank, if no plan of some replica fits.
        """
        work, problem = None, None
        try:
            work = self._source.work(step, consumed=self._consumed)
        except MemoryError as error:
            problem = str(error)
        taken = None if work is None else work.samples
        note = "" if taken is None else taken.note
        told = self._peers.all_gather((problem, note))
        for rank, (_, said) in enumerate(told):
            if said:
                where = f"rank {rank}: " if self._ranks.mesh.is_distributed else ""
                self._records.say(f"step {step + 1}: {where}{said}")
        for problem, _ in told:
            if problem is not None:
                raise StepTooLargeError(f"step {step + 1}: {problem}")
        assert work is not None, "a step without a problem has work"
        if taken is not None:
            plan, division = taken.replica.plan, (work.consumed, taken.replica.replicas)
            self._ranks.check_same(
                f"division of the samples of step {step + 1}",
                hashlib.sha256(repr(division).encode()).hexdigest(),
            )
            self._ranks.check_same(f"plan of step {step + 1}", plan.digest, in_replica=True)
        return work

    def _names(self, own: Sequence[str]) -> list[str]:
        """Return the sorted union of the names `own` of all ranks. Collective."""
        return sorted({name for names in self._peers.all_gather(own) for name in names})

    def _save_if_due(self, done: int) -> None:
        every = self._run.checkpoint.every
        # While steps are skipped the state does not change, and the cause may already be in the
        # weights: saving them would displace checkpoints from before.
        if every != "auto" and every and done % every == 0 and not self._guard.failing:
            self._save()

    def _saves_now(self) -> bool:
        """Return whether a run that ends now must be saved. Collective."""
        if self._run.checkpoint.at_end or self._outcome.done_steps < self._run.train.steps:
            return True
        return any(self._peers.all_gather(self._records.failure is not None))

    def _save_if_first(self) -> None:
        """Save a checkpoint of a failed run if it has none, so that its steps are not lost."""
        self._checkpoints.wait()
        if self._checkpoints.are_missing():
            self._save()

    def _save(self) -> str | None:
        """Save a checkpoint; print and return why it was not saved, or return None."""
        began = time.monotonic()
        unsaved = self._checkpoints.save(
            self._outcome.done_steps,
            sequences_consumed=self._consumed,
            more=self._source.saved(),
        )
        self._saved_step, self._saved_at = self._outcome.done_steps, time.monotonic()
        self._saving_s = self._saved_at - began
        if unsaved is not None:
            self._records.say(unsaved)
        return unsaved
