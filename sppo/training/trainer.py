"""Training of a run: its state, its loop of steps, and the checkpoints of the loop.

A step reads its sequences, accumulates their gradients through the engine, clips them, updates the
weights, and reports. The work of a step follows from its number and the state in the checkpoint, so
a resumed run continues bit for bit.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from math import ceil
from pathlib import Path

import torch

from sppo.config import RunConfig
from sppo.config.model import ModelConfig
from sppo.cost.parameters import parameter_shapes
from sppo.engine.engine import Engine
from sppo.engine.unit import SequenceData
from sppo.model.gradients import zero_gradients
from sppo.optim.adamw import AdamW, clip_, global_norm
from sppo.optim.learning_rate import learning_rate
from sppo.output_file import write_json
from sppo.planning.plan import plan_json
from sppo.report.metrics import StepMetrics
from sppo.schedule.actions import Action
from sppo.training.devices.device import Device
from sppo.training.executed_step import step_timelines
from sppo.training.interruption import Interrupted, NonFiniteError, StopRequest
from sppo.training.preflight import CheckedRun
from sppo.training.records import Baseline, StepRecords, TrainingOutcome
from sppo.training.run_checkpoints import RunCheckpoints
from sppo.training.run_directory import PLAN_FILE, locked_output, note_configuration
from sppo.training.sample_steps import SampleSteps
from sppo.training.state import DTYPES, TrainingState, build_state, loss_terms
from sppo.training.step import (
    NonFiniteGuard,
    SequenceSteps,
    StepSource,
    StepSums,
    StepWork,
    run_step,
)

_log = logging.getLogger(__name__)

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
    _log.info("%s", device.describe_memory())
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
    state = build_state(job, plan)
    # Failures are recorded first: closing the state may wait for a device that hangs.
    with closing(state), job.progress.failing():
        checkpoints = RunCheckpoints(job, state, output=output, tokens=data.data)
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
            loop = StepLoop(checked, state, outcome, checkpoints=checkpoints, source=source)
            loop.run(consumed=int(metadata.get("sequences_consumed", 0)))
        outcome.file_bytes = max(0, job.device.file_bytes() - base.file_bytes)
        exposed_s = outcome.copies[-1].exposed_s if outcome.copies else 0.0
        outcome.timelines = step_timelines(
            job, plan, outcome.last_work, outcome.last_step, exposed_copy_s=exposed_s
        )
    return outcome


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
    ) -> None:
        job, plan = checked.job, checked.plan
        run, peers = job.run, job.peers
        self._job, self._run, self._peers = job, run, peers
        self._state, self._outcome, self._source = state, outcome, source
        self._data = checked.data
        self._checkpoints, self._records = checkpoints, StepRecords(job, outcome)
        self._consumed = 0
        """Number of sequences, or samples, that all earlier steps consumed."""
        self._guard = NonFiniteGuard(run, peers)
        self._schedule = state.engine.schedule([plan.lengths] * plan.sequences)
        peers.check_same_result("schedule", self._schedule.digest())
        job.progress.note(
            step=outcome.first_step,
            position=0,
            action="",
            num_actions=len(self._schedule.programs[job.mesh.at.pipeline]),
        )
        self._stopped_by: str | None = None
        self._saved_step, self._saved_at, self._saving_s = outcome.first_step, time.monotonic(), 0.0

    def run(self, *, consumed: int) -> None:
        """Run all remaining steps; save when interrupted, and at the end unless disabled.

        Args:
            consumed: Number of sequences, or samples, that all earlier steps consumed.

        Raises:
            NonFiniteError: Too many steps in a row were not finite, or the state at the end is not.
            StepTooLargeError: A step of samples does not fit; the state before it is saved.
            OSError: A step could not be recorded; the state is saved.
        """
        outcome, total, self._consumed = self._outcome, self._run.train.steps, consumed
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
            except (StepTooLargeError, NonFiniteError) as error:
                self._save_what_is_left(error)
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

    # A step

    def _step(self, step: int, stop: StopRequest) -> StepMetrics:
        """Run step number ``step``, counted from 0."""
        progress, alone = self._job.progress, not self._job.mesh.is_distributed
        display, device = self._records.display, self._job.device
        began_s = time.perf_counter()
        device.reset_peak()
        work = self._agreed_work(step)
        program = work.planned.program if work.planned else self._schedule
        display.step_begins(num_actions=len(program.programs[self._job.mesh.at.pipeline]))
        lr = learning_rate(step, config=self._run.optimizer, total_steps=self._run.train.steps)

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
            decide=lambda sums: lr if self._may_update(step, sums) else None,
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
            plan, division = taken.replica.plan, (work.consumed, taken.replica.replicas)
            self._peers.check_same_result(
                f"division of the samples of step {step + 1}",
                hashlib.sha256(repr(division).encode()).hexdigest(),
            )
            self._peers.check_same_result(
                f"plan of step {step + 1}", plan.digest, replica=self._job.mesh.at.data
            )
        return work

    # Checkpoints

    def _is_due_by_time(self) -> bool:
        """Return whether an automatic checkpoint is due by the clock of this rank."""
        if self._run.checkpoint.every != "auto" or self._guard.failing:
            return False
        waited_s = time.monotonic() - self._saved_at
        is_new = self._outcome.done_steps > self._saved_step
        return is_new and waited_s >= max(AUTOMATIC_S, self._saving_s / SAVING_SHARE)

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

    def _save_what_is_left(self, error: StepTooLargeError | NonFiniteError) -> None:
        """Save the steps of a failed run; if they were not finite, only if no checkpoint exists."""
        self._checkpoints.wait()
        if isinstance(error, StepTooLargeError) or self._checkpoints.are_missing():
            self._save()
            self._checkpoints.wait()

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


# Warm-up

_WARM_UP_TOKENS = 64
_MOST_LENGTHS = 16
"""Largest number of distinct lengths with a step each; equal cuts have one or two lengths."""
_TINY = {
    "preset": None,
    "from_hf": None,
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "mlp_size": 32,
    "max_positions": 2 * _WARM_UP_TOKENS,
    "sliding_window_first_layer": 0,
}


def warm_up(run: RunConfig, *, lengths: Sequence[int], device: Device) -> None:
    """Train a step of a tiny model, then one of a single layer for each length on this rank.

    The first step of a process loads libraries, starts threads, and compiles kernels for every
    shape of a matrix product (on a CPU with bf16 two thirds of a MiB each): tens of MiB and tenths
    of a second that belong to no bucket and no phase of a run. Thus they are part of the baseline,
    before memory and time are measured. The models are discarded.

    Args:
        run: Validated run configuration.
        lengths: Lengths of the subsequences, in tokens.
        device: Device that computes.
    """
    tiny = run.model.model_copy(update=_TINY)
    _warm_up_step(
        run,
        tiny,
        cuts=(0, _WARM_UP_TOKENS, 2 * _WARM_UP_TOKENS),
        with_optimizer=True,
        device=device,
    )
    # Each sequence-parallel rank holds a shard of a subsequence.
    own = {ceil(tokens / run.parallel.sequence_parallel_degree) for tokens in lengths}
    for tokens in sorted(own, reverse=True)[:_MOST_LENGTHS]:
        # Two subsequences, so that the second has a prefix.
        cuts = (0, tokens, 2 * tokens) if len(lengths) > 1 else (0, tokens)
        update = {
            "num_layers": 1,
            "sliding_window_first_layer": 0,
            "max_positions": max(run.model.max_positions or 0, cuts[-1]),
        }
        model = run.model.model_copy(update=update)
        _warm_up_step(run, model, cuts=cuts, with_optimizer=False, device=device)
    gc.collect()  # the engine's parts refer to each other
    device.trim()


def _warm_up_step(
    run: RunConfig,
    model: ModelConfig,
    *,
    cuts: tuple[int, ...],
    with_optimizer: bool,
    device: Device,
) -> None:
    dtype, place = DTYPES[run.train.dtype], device.torch_device
    weights = {
        name: torch.zeros(shape, dtype=dtype, device=place)
        for name, shape in parameter_shapes(model).items()
    }
    gradients = zero_gradients(weights)
    engine = Engine(
        model,
        weights=weights,
        gradients=gradients,
        policy="keep_attention",
        loss_terms=loss_terms(run),  # kernels are compiled for these terms
    )
    tokens = torch.arange(cuts[-1] + 1) % model.vocab_size
    engine.accumulate([device.put(SequenceData(tokens[:-1], tokens[1:]))], [cuts])
    if with_optimizer:
        optimizer = AdamW(weights, config=run.optimizer)
        clip_(gradients, norm=global_norm(gradients), clip_norm=run.optimizer.clip_norm or 1.0)
        optimizer.step(gradients, lr=0.0)
