"""Training of a run: its state, and its loop of steps.

A step reads its sequences, accumulates their gradients through the engine, clips them, updates the
weights, and reports. The work of a step follows from its number and the state in the checkpoint, so
a resumed run continues bit for bit.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import time
from contextlib import ExitStack, closing
from pathlib import Path

from sppo.optim.learning_rate import learning_rate
from sppo.output_file import write_json
from sppo.planning.plan import plan_json
from sppo.report.metrics import StepMetrics, read_records
from sppo.report.validation import VALIDATION_FILE, ValidationMetrics
from sppo.schedule.actions import Action
from sppo.training.interruption import Interrupted, NonFiniteError, StopRequest
from sppo.training.preflight import CheckedRun
from sppo.training.records.executed_step import step_timelines
from sppo.training.records.outcome import Baseline, TrainingOutcome
from sppo.training.records.step_records import StepRecords
from sppo.training.run_checkpoints import SAVE_FILE, RunCheckpoints
from sppo.training.run_directory import PLAN_FILE, locked_output, note_configuration
from sppo.training.sample_steps import SampleSteps
from sppo.training.state import DTYPES, TrainingState, build_state
from sppo.training.step import SequenceSteps, StepSource, StepWork, run_step
from sppo.training.validation.validator import Validator
from sppo.training.warm_up import warm_up
from sppo.training.watch.computed import StepSums
from sppo.training.watch.corruption import Watch
from sppo.training.watch.nonfinite import START_ANEW, NonFiniteGuard

_log = logging.getLogger(__name__)


class StepTooLargeError(MemoryError):
    """A step of samples does not fit in memory; the state before that step is saved."""


def train(checked: CheckedRun) -> TrainingOutcome:
    """Train until ``train.steps`` steps are done, from the newest checkpoint if there is one.

    Raises:
        ValueError: The output directory is in use, or its checkpoints cannot be read.
        CheckpointError: A checkpoint cannot be written, e.g. because the disk is full; earlier
            checkpoints are untouched.
        NonFiniteError: Too many steps in a row had NaN or inf, or the state at the end has.
        StepTooLargeError: A step of samples does not fit; the state before it is saved.
        OSError: A step could not be recorded; the state is saved.
        PeerLostError: Another rank ended or does not answer.
    """
    job, started = checked.job, time.perf_counter()
    run, device = job.run, job.device
    device.begin()
    before, files = device.held_bytes(), device.file_bytes()
    # Both calls that follow load libraries, whose memory belongs to the baseline.
    peak_flops_per_s = device.peak_flops_per_s(DTYPES[run.train.dtype])
    warm_up(run, lengths=checked.plan.lengths, device=device)
    held = device.held_bytes()
    warm_up_bytes = max(0, held - before) if device.kind == "cpu" else 0
    capacity_bytes = device.capacity_bytes(baseline_bytes=held)
    base = Baseline(held, warm_up_bytes, files, capacity_bytes, peak_flops_per_s)
    with ExitStack() as locked:
        output = job.peers.decided_by_main(lambda: locked.enter_context(locked_output(run)))
        outcome = _train_into(output, checked, base)
        # The report that follows draws plots in the memory that training used.
        gc.collect()  # the engine's parts refer to each other
        device.trim()
    outcome.wall_s = time.perf_counter() - started
    return outcome


def _train_into(output: Path, checked: CheckedRun, base: Baseline) -> TrainingOutcome:
    """Build the state, load the newest checkpoint if there is one, and run the steps left."""
    job, plan, data = checked.job, checked.plan, checked.data
    run, peers = job.run, job.peers
    state = build_state(job, plan, start=checked.start)
    # Failures are recorded first: closing the state may wait for a device that hangs.
    with closing(state), job.progress.failing():
        checkpoints = RunCheckpoints(
            job, state, output=output, sources=data.sources, start=checked.start
        )
        first_step, metadata = checkpoints.resume()
        peers.decided_by_main(lambda: note_configuration(run, output))
        if first_step < run.train.steps:
            peers.decided_by_main(lambda: write_json(output / PLAN_FILE, plan_json(plan)))
        outcome = TrainingOutcome(output, base, first_step, first_step)
        outcome.buckets.count_state(state)
        source: StepSource
        if run.data.samples == "documents":
            source = SampleSteps(job, data, plan, metadata)
        else:
            source = SequenceSteps(job, data, plan)
        with closing(source), job.progress.failing():
            loop = StepLoop(
                checked,
                state,
                outcome,
                checkpoints=checkpoints,
                source=source,
                validator=_validator(checked, state, output=output, first_step=first_step),
            )
            loop.run(consumed=int(metadata.get("sequences_consumed", 0)))
        outcome.file_bytes = max(0, job.device.file_bytes() - base.file_bytes)
        exposed_s = outcome.copies[-1].exposed_s if outcome.copies else 0.0
        outcome.timelines = step_timelines(
            job, plan, outcome.last_work, outcome.last_step, exposed_copy_s=exposed_s
        )
    return outcome


def _validator(
    checked: CheckedRun, state: TrainingState, *, output: Path, first_step: int
) -> Validator | None:
    """Return the validations of a run, after those of its steps so far; None without any."""
    if checked.validation is None:
        return None
    records = checked.job.peers.decided_by_main(
        lambda: read_records(output / VALIDATION_FILE, ValidationMetrics)
    )
    history = [record for record in records if record.step <= first_step]
    return Validator(checked.job, state, checked.validation, history=history)


class StepLoop:
    """The steps that one call of :func:`train` runs."""

    def __init__(
        self,
        checked: CheckedRun,
        state: TrainingState,
        outcome: TrainingOutcome,
        *,
        checkpoints: RunCheckpoints,
        source: StepSource,
        validator: Validator | None,
    ) -> None:
        job, plan = checked.job, checked.plan
        run, peers = job.run, job.peers
        self._job, self._run, self._peers = job, run, peers
        self._state, self._outcome, self._source = state, outcome, source
        self._data, self._validator = checked.data, validator
        self._checkpoints, self._records = checkpoints, StepRecords(job, checked.data, outcome)
        self._consumed = 0
        """Number of sequences, or samples, that all earlier steps consumed."""
        self._guard = NonFiniteGuard(run, peers)
        self._watch = Watch(job, state, say=self._records.say) if run.train.watch else None
        self._schedule = state.engine.schedule([plan.lengths] * plan.sequences)
        peers.check_same_result("schedule", self._schedule.digest())
        job.progress.note(
            step=outcome.first_step,
            position=0,
            action="",
            num_actions=len(self._schedule.programs[job.mesh.at.pipeline]),
        )
        job.progress.reached("loaded")
        self._stopped_by: str | None = None

    def run(self, *, consumed: int) -> None:
        """Run all remaining steps; save when interrupted, and at the end unless disabled.

        Args:
            consumed: Number of sequences, or samples, that all earlier steps consumed.

        Raises:
            NonFiniteError: Too many steps in a row were not finite, or the state at the end is not.
            StepTooLargeError: A step of samples does not fit; the state before it is saved.
            OSError: A step could not be recorded; the state is saved.
            CorruptionError: The device of this rank computed or kept wrong values.
        """
        outcome, total, self._consumed = self._outcome, self._run.train.steps, consumed
        with self._records.opened(), StopRequest() as stop:
            try:
                self._validate_if_due(stop)
                for step in range(outcome.first_step, total):
                    if self._ends_early():
                        break
                    self._save_if(self._agree_to_go_on(stop))
                    metrics = self._step(step, stop)
                    outcome.done_steps = step + 1
                    self._records.record(metrics)
                    self._job.progress.reached("first step")
                    self._validate_if_due(stop)
                    self._save_if(self._checkpoints.is_due_by_step(step + 1))
            except Interrupted:
                outcome.interrupted_by = stop.signal_name or self._stopped_by
                done = f"saving after step {outcome.done_steps}"
                self._records.say(f"{outcome.interrupted_by}: {done}")
            except (StepTooLargeError, NonFiniteError) as error:
                self._checkpoints.wait()
                if isinstance(error, StepTooLargeError) or self._checkpoints.are_missing():
                    self._save()
                    self._checkpoints.wait()
                raise
            outcome.saved = self._saves_now()
            unsaved = self._save() if outcome.saved else None
            self._checkpoints.wait()
        if unsaved is not None:
            raise NonFiniteError(f"{unsaved}; {START_ANEW}")
        self._agree_that_all_is_recorded()

    def _agree_to_go_on(self, stop: StopRequest) -> bool:
        """Return whether a checkpoint is due or asked for on rank 0, on all ranks.

        Raises:
            Interrupted: A rank received a signal, or failed to record a step.
        """
        reason = stop.signal_name
        if self._records.failure is not None:
            reason = f"{self._records.failure.filename}: {self._records.failure.strerror}"
        done, checkpoints = self._outcome.done_steps, self._checkpoints
        is_due = checkpoints.is_due_by_time(done) or checkpoints.is_asked_for(done)
        told = self._peers.all_gather((reason, is_due))
        named = [name for name, _ in told if name is not None]
        if named:
            self._stopped_by = named[0]
            raise Interrupted(named[0])
        return told[0][1]

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

    # A validation

    def _validate_if_due(self, stop: StopRequest) -> None:
        """Evaluate the sets if that is due, and keep the state if it is the best so far.

        Raises:
            Interrupted: A rank received a signal, or failed to record a step; nothing is recorded
                of the validation.
        """
        done, validator = self._outcome.done_steps, self._validator
        if validator is None or not validator.is_due(done):
            return
        progress, alone = self._job.progress, not self._job.mesh.is_distributed

        def before_action(position: int, action: Action) -> None:
            if alone:
                stop.check()
            progress.note(step=done, position=position, action=f"{action} of a validation")

        found = validator.run(
            done, before_round=lambda: self._agree_to_go_on(stop), before_action=before_action
        )
        self._outcome.add_validation(
            found.seconds, peak_bytes=found.peak_bytes, progress=validator.progress
        )
        self._records.record_validation(found.records, found.line)
        # Step 0 has no checkpoint: its weights are those that the run starts from.
        if found.is_best and done and validator.keeps_best:
            self._save(is_best=True)

    def _ends_early(self) -> bool:
        """Return whether the run ends for want of improvement, and note why."""
        if self._validator is None or self._validator.why_stop is None:
            return False
        self._outcome.stopped_early = self._validator.why_stop
        return True

    # A step

    def _step(self, step: int, stop: StopRequest) -> StepMetrics:
        """Run step number ``step``, counted from 0."""
        progress, alone = self._job.progress, not self._job.mesh.is_distributed
        display, device = self._records.display, self._job.device
        began_s = time.perf_counter()
        device.reset_peak()
        work = self._agreed_work(step)
        program = work.planned.program if work.planned else self._schedule
        num_actions = len(program.programs[self._job.mesh.at.pipeline])
        display.step_begins(num_actions=num_actions)
        lr = learning_rate(step, config=self._run.optimizer, total_steps=self._run.train.steps)

        def before_action(position: int, action: Action) -> None:
            if alone:
                stop.check()
            progress.note(
                step=work.number, position=position, num_actions=num_actions, action=str(action)
            )
            display.action()

        done = run_step(
            self._job,
            self._state,
            work,
            began_s=began_s,
            before_action=before_action,
            decide=lambda sums: lr if self._may_update(step, sums) else None,
            watch=self._watch,
        )
        copies_bytes = done.copies.device_bytes
        self._outcome.buckets.count_step(done.peaks, copies_bytes=copies_bytes, pool=device.pool())
        self._consumed += len(work.consumed)
        learnt = self._source.learn(work, done)
        return self._records.measured(work, done, lr=lr, learnt=learnt)

    def _may_update(self, step: int, sums: StepSums) -> bool:
        """Return whether the update of a step may be applied; print why if not."""
        if sums.num_valid:
            problem = self._guard.problem(step + 1, sums)
        else:
            why = self._data.why_no_labels(self._consumed)
            problem = f"step {step + 1}: {why}. The update is skipped"
        if problem is not None:
            self._records.say(problem)
        return problem is None

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
                where = f"rank {rank}: " if self._job.mesh.is_distributed else ""
                self._records.say(f"step {step + 1}: {where}{said}")
        for problem, _ in told:
            if problem is not None:
                raise StepTooLargeError(f"step {step + 1}: {problem}")
        assert work is not None, "a step without a problem has work"
        if taken is not None:
            plan, division = taken.plan, (work.consumed, taken.plan.replicas)
            self._peers.check_same_result(
                f"division of the samples of step {step + 1}",
                hashlib.sha256(repr(division).encode()).hexdigest(),
            )
            self._peers.check_same_result(
                f"plan of step {step + 1}", plan.digest, replica=self._job.mesh.at.data
            )
        return work

    def _saves_now(self) -> bool:
        """Return whether a run that ends now must be saved. Collective."""
        if self._run.checkpoint.at_end or self._outcome.done_steps < self._run.train.steps:
            return True
        asked = self._checkpoints.is_asked_for(self._outcome.done_steps)
        return any(self._peers.all_gather(asked or self._records.failure is not None))

    def _save_if(self, is_due: bool) -> None:
        """Save a checkpoint if it is due, unless the update of the last step was skipped.

        While steps are skipped the state does not change, and the cause may already be in the
        weights: saving them would displace checkpoints from before.
        """
        if is_due and not self._guard.failing:
            self._save()

    def _save(self, *, is_best: bool = False) -> str | None:
        """Save a checkpoint; print and return why it was not saved, or return None."""
        step = self._outcome.done_steps
        if self._checkpoints.take_request():
            self._records.say(
                f"saving after step {step}: the file {SAVE_FILE} asked, and is removed"
            )
        unsaved = self._checkpoints.save(
            step,
            sequences_consumed=self._consumed,
            more=self._source.saved(),
            is_best=is_best,
            check=self._check_weights,
        )
        if unsaved is not None:
            self._check_weights()  # values that are not finite may be a device's fault
            self._records.say(unsaved)
        return unsaved

    def _check_weights(self) -> None:
        """Raise CorruptionError if weights of this rank changed since the last update."""
        if self._watch is not None:
            self._watch.check_weights(self._outcome.done_steps)
