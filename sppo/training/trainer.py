"""The training loop: one optimizer step after another, saved so that a kill loses little.

A step reads its sequences, accumulates their gradients through the engine, clips, updates, and
reports. Everything that decides what a step does is a function of its number, so a resumed run
continues bit for bit.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from sppo.checkpoint.checkpoint import CheckpointManager, run_metadata
from sppo.checkpoint.files import CHECKPOINTS_DIRECTORY, list_checkpoints
from sppo.config import RunConfig
from sppo.cost.memory.stage_memory import MemoryBuckets
from sppo.data.tokens import TokenData
from sppo.engine.engine import StepResult
from sppo.offload.copy_report import CopyReport
from sppo.optim.learning_rate import learning_rate
from sppo.output_file import write_json
from sppo.parallel.job.failures import PeerLostError
from sppo.parallel.job.timeouts import device_timeouts
from sppo.planning.plan import plan_json
from sppo.report.display import TrainingDisplay
from sppo.report.metrics import METRICS_FILE, JsonlSink, MetricSink, StepMetrics
from sppo.report.step_line import step_line
from sppo.report.tensorboard_sink import TensorBoardSink
from sppo.schedule.actions import Action
from sppo.schedule.timeline import Timeline
from sppo.training.checks.input_facts import input_facts
from sppo.training.checks.preflight import Preflight
from sppo.training.devices.cpu_device import CpuDevice
from sppo.training.devices.device import Device
from sppo.training.executed_step import executed_timeline
from sppo.training.interruption import Interrupted, StopRequest
from sppo.training.ranks import Ranks, one_rank, shared_output
from sppo.training.run_directory import (
    PLAN_FILE,
    TENSORBOARD_DIRECTORY,
    note_configuration,
    require_output,
)
from sppo.training.state import TrainingState, build_state
from sppo.training.state_tensors import DTYPES
from sppo.training.steps.measured import MeasuredBuckets, StepPhases
from sppo.training.steps.nonfinite import (
    NonFiniteError,
    NonFiniteGuard,
    nonfinite_place,
    nonfinite_state,
)
from sppo.training.steps.step import DoneStep, StepHooks, StepInput, StepSums, run_step
from sppo.training.steps.step_work import PlannedPhases, StepWork, step_source
from sppo.training.steps.warm_up import warm_up

_log = logging.getLogger(__name__)

_START_ANEW = (
    "earlier checkpoints are untouched: start anew in another train.output with a lower "
    "optimizer.lr, longer optimizer.warmup_steps, or train.dtype=fp32"
)
_STANDARD_OUTPUT = "standard output"
CHECKPOINT_TIMEOUT_FACTOR = 10
"""Times as long as a rank waits in a step, it waits for others to read or write a checkpoint."""


class StepTooLargeError(MemoryError):
    """A step of samples does not fit; the state before it is saved."""


@dataclass(slots=True)
class TrainingOutcome:
    """What a call of :func:`train` did."""

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
    buckets: MeasuredBuckets = field(default_factory=lambda: MeasuredBuckets())
    copies: list[CopyReport] = field(default_factory=list)
    """One entry per step of this process."""
    last_step: StepResult | None = None
    """What this rank executed in its last step, and when."""
    planned_phases: list[PlannedPhases] = field(default_factory=list)
    """Predicted seconds, one entry per step of this process."""
    most_planned: MemoryBuckets | None = None
    """Predicted memory of the step with most."""
    timeline: Timeline | None = None
    """The last step of a pipeline of ranks; on rank 0."""
    planned_timeline: Timeline | None = None
    """The same step as it was simulated."""
    exposed_copy_s: tuple[float, ...] = ()
    """How long each of those ranks waited for copies in it."""


def train(
    run: RunConfig,
    preflight: Preflight,
    *,
    console: Console,
    ranks: Ranks | None = None,
    device: Device | None = None,
) -> TrainingOutcome:
    """Train until ``train.steps`` are done, from the newest checkpoint if there is one.

    Args:
        run: checked.
        preflight: of the same run.
        console: where progress goes.
        ranks: with whom this process trains; None: alone.
        device: that it computes on; None: the CPU.

    Raises:
        ValueError: the output directory is in use, or its checkpoints cannot be read.
        CheckpointError: the disk is full; earlier checkpoints are untouched.
        NonFiniteError: too many steps in a row with NaN or inf, or the state at the end has them.
        StepTooLargeError: a step of samples does not fit; the state is saved.
        OSError: a step could not be recorded; the state is saved.
        PeerLostError: another rank ended or does not answer.
    """
    ranks, device = ranks or one_rank(), device or CpuDevice()
    started = time.perf_counter()
    if ranks.mesh.is_distributed:
        ranks.check_same_facts(input_facts(run, preflight.data.data))
    device.begin()
    _log.info("%s", device.describe_memory())
    before = device.held_bytes()
    # Next, for both load libraries, which belong to the baseline.
    peak_flops_per_s = device.peak_flops_per_s(DTYPES[run.train.dtype])
    warm_up(run, lengths=preflight.plan.lengths, device=device)
    baseline = device.held_bytes()
    capacity = device.capacity_bytes(baseline_bytes=baseline)
    with shared_output(run, ranks) as output:
        state = build_state(run, plan=preflight.plan, mesh=ranks.mesh, device=device)
        manager = CheckpointManager(
            output / CHECKPOINTS_DIRECTORY,
            keep=run.checkpoint.keep,
            async_save=run.checkpoint.async_save,
            group=ranks.mesh.groups.world,
            timeout_s=CHECKPOINT_TIMEOUT_FACTOR * run.parallel.timeout_s,
        )
        first_step, metadata = _resume(manager, state, tokens=preflight.data.data)
        _check_finite(run, state, ranks=ranks)
        state.tensors.forget()
        ranks.decided_by_main(lambda: note_configuration(run, output))
        if first_step < run.train.steps:
            ranks.decided_by_main(lambda: write_json(output / PLAN_FILE, plan_json(preflight.plan)))
        outcome = TrainingOutcome(output, first_step, first_step, baseline_bytes=baseline)
        outcome.warm_up_bytes = max(0, baseline - before) if device.kind == "cpu" else 0
        outcome.buckets.count_state(state)
        loop = _Loop(
            run,
            preflight,
            state,
            manager,
            outcome,
            ranks=ranks,
            device=device,
            capacity_bytes=capacity,
            peak_flops_per_s=peak_flops_per_s * ranks.mesh.shape.num_ranks,
            metadata=metadata,
        )
        # The failure is noted first: closing may wait for a device that no longer answers.
        with closing(state.engine), closing(loop), ranks.progress.failing():
            loop.run(console)
        outcome.timeline = executed_timeline(outcome.last_step, ranks)
        if outcome.timeline is not None:
            outcome.planned_timeline = loop.planned_timeline()
        own_s = outcome.copies[-1].exposed_s if outcome.copies else 0.0
        exposed_s = ranks.peers.all_gather(own_s)
        outcome.exposed_copy_s = tuple(exposed_s[rank] for rank in ranks.mesh.pipeline_ranks)
        # What is drawn and written next has the memory that training had.
        del loop, manager, state
        gc.collect()  # the engine's parts refer to each other
        device.trim()
    outcome.wall_s = time.perf_counter() - started
    return outcome


def _resume(
    manager: CheckpointManager, state: TrainingState, *, tokens: TokenData
) -> tuple[int, Mapping[str, Any]]:
    """Load the newest valid checkpoint into ``state``.

    Returns:
        Steps done so far, and the checkpoint's metadata, {} without one.

    Raises:
        ValueError: the token data is not what the run began with.
    """
    checkpoint = manager.latest_valid()
    if checkpoint is None:
        return 0, {}
    began_with = checkpoint.metadata.get("tokens_sha256")
    if began_with not in (None, tokens.meta.tokens_sha256):
        raise ValueError(
            f"{tokens.directory} holds other tokens than the run began with ({checkpoint.path}); "
            "prepare the old ones again, or choose another train.output"
        )
    live = state.optimizer.state()
    manager.load_into(checkpoint, state.sharded.blocks(live))
    state.optimizer.load_state(live)
    state.sharded.gather(state.weights)
    _log.info("going on after step %d from %s", checkpoint.step, checkpoint.path)
    return checkpoint.step, checkpoint.metadata


def _check_finite(run: RunConfig, state: TrainingState, *, ranks: Ranks) -> None:
    """Refuse a state that could never be saved.

    Raises:
        ValueError: on every rank, where one starts with NaN or infinite values; names the first.
    """
    blocks = state.sharded.blocks(state.optimizer.state())
    found = [
        place for place in ranks.peers.all_gather(nonfinite_place(blocks)) if place is not None
    ]
    if found:
        raise ValueError(
            f"{run.model.from_hf or run.train.output}: {found[0]}; training would keep it, and no "
            "checkpoint with NaN or infinity is saved: repair the weights"
        )


class _Loop:
    """The steps of one call of :func:`train`."""

    def __init__(
        self,
        run: RunConfig,
        preflight: Preflight,
        state: TrainingState,
        manager: CheckpointManager,
        outcome: TrainingOutcome,
        *,
        ranks: Ranks,
        device: Device,
        capacity_bytes: int,
        peak_flops_per_s: float,
        metadata: Mapping[str, Any],
    ) -> None:
        self._run, self._state, self._device = run, state, device
        self._ranks, self._peers = ranks, ranks.peers
        self._data, self._plan = preflight.data, preflight.plan
        self._source = step_source(
            run, preflight.data, plan=preflight.plan, ranks=ranks, metadata=metadata
        )
        self._consumed = int(metadata.get("sequences_consumed", 0))
        self._last_work: StepWork | None = None
        self._manager, self._outcome = manager, outcome
        self._capacity_bytes = capacity_bytes
        self._guard = NonFiniteGuard(
            stop_at_once=run.train.nonfinite == "stop", limit=run.train.max_nonfinite_steps
        )
        schedule = state.engine.schedule([self._plan.lengths] * self._plan.sequences)
        ranks.check_same_on_all_ranks("schedule", schedule.digest())
        self._schedule = schedule
        ranks.progress.note(
            step=outcome.first_step,
            position=0,
            action="",
            num_actions=len(schedule.programs[ranks.mesh.at.pipeline]),
        )
        self._peak_flops_per_s = peak_flops_per_s
        self._stopped_by: str | None = None
        self._unrecorded: OSError | None = None

    def close(self) -> None:
        """End what prepares steps ahead."""
        self._source.close()

    def planned_timeline(self) -> Timeline | None:
        """Return the simulation of the last step of this rank's replica; None without a step."""
        last = self._last_work
        return None if last is None else self._source.planned_timeline(last)

    def run(self, console: Console) -> None:
        """All remaining steps; saves when interrupted, and at the end unless told not to.

        Raises:
            NonFiniteError: too many steps failed, or the state at the end cannot be saved.
            StepTooLargeError: a step of samples does not fit; the state is saved.
            OSError: a step could not be recorded; the state is saved.
        """
        outcome, total = self._outcome, self._run.train.steps
        started = time.perf_counter()
        with ExitStack() as stack:
            sinks: list[MetricSink] = []
            self._ranks.decided_by_main(lambda: sinks.extend(self._sinks(stack)))
            display = stack.enter_context(
                TrainingDisplay(
                    console,
                    total_steps=total,
                    first_step=outcome.first_step,
                )
            )
            stop = stack.enter_context(StopRequest())
            try:
                for step in range(outcome.first_step, total):
                    self._agree_to_go_on(stop)
                    metrics = self._step(step, display, stop)
                    outcome.done_steps = step + 1
                    self._record(metrics, sinks, display, line=self._line(metrics, started))
                    self._save_if_due(step + 1, display)
            except Interrupted:
                outcome.interrupted_by = stop.signal_name or self._stopped_by
                done = f"saving after step {outcome.done_steps}"
                self._say(f"{outcome.interrupted_by}: {done}", display)
            except StepTooLargeError:
                self._save(display)
                self._manager.wait()
                raise
            except NonFiniteError:
                self._save_if_first(display)
                self._manager.wait()
                raise
            outcome.saved = self._saves_now()
            unsaved = self._save(display) if outcome.saved else None
            self._manager.wait()
        if unsaved is not None:
            raise NonFiniteError(f"{unsaved}; {_START_ANEW}")
        self._agree_that_all_is_recorded()

    def _agree_to_go_on(self, stop: StopRequest) -> None:
        """Stop all ranks, between steps, once one is asked to or cannot record its steps.

        Raises:
            Interrupted: one was, or cannot.
        """
        reason = stop.signal_name
        if self._unrecorded is not None:
            reason = f"{self._unrecorded.filename}: {self._unrecorded.strerror}"
        named = [name for name in self._peers.all_gather(reason) if name is not None]
        if named:
            self._stopped_by = named[0]
            raise Interrupted(named[0])

    def _agree_that_all_is_recorded(self) -> None:
        """Raise, on every rank, what kept one from recording a step."""
        faults = [fault for fault in self._peers.all_gather(self._unrecorded) if fault is not None]
        if faults:
            done, total = self._outcome.done_steps, self._run.train.steps
            faults[0].add_note(
                f"all {total} steps are done and saved, the record of the last is missing"
                if done == total
                else f"the state after step {done} of {total} is saved; free some space, and the "
                "same command goes on"
            )
            raise faults[0]

    def _step(self, step: int, display: TrainingDisplay, stop: StopRequest) -> StepMetrics:
        """Run step number ``step``, counted from 0."""
        progress, alone = self._ranks.progress, not self._ranks.mesh.is_distributed

        def before_action(position: int, action: Action) -> None:
            if alone:
                stop.check()
            progress.note(step=step + 1, position=position, action=str(action))
            display.action()

        work: list[StepWork] = []

        def read() -> StepInput:
            work.append(self._planned(step, display))
            display.step_begins(num_actions=self._num_actions(work[0]))
            return self._input(work[0])

        done = run_step(
            self._state,
            StepHooks(
                read=read,
                before_action=before_action,
                on_failure=progress.failed,
                reduced=lambda result: self._await_device(step, result, work[0]),
                learning_rate=lambda sums: self._learning_rate(step, sums, display),
            ),
            clip_norm=self._run.optimizer.clip_norm,
            device=self._device,
            peers=self._peers,
            buckets=self._outcome.buckets,
        )
        self._outcome.last_step, self._last_work = done.result, work[0]
        self._consumed += work[0].num_consumed
        return self._measure(step, done, work[0])

    def _learning_rate(self, step: int, sums: StepSums, display: TrainingDisplay) -> float | None:
        """Return the step's learning rate; None, and say why, where nothing is to be updated."""
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
        self._say(problem, display)
        return None

    def _scheduled_lr(self, step: int) -> float:
        return learning_rate(step, config=self._run.optimizer, total_steps=self._run.train.steps)

    def _await_device(self, step: int, result: StepResult, work: StepWork) -> None:
        """Wait for the device, which waits for the devices of other ranks.

        Raises:
            PeerLostError: it does not get on.
        """
        if not self._ranks.mesh.is_distributed:
            return
        still_s = device_timeouts(
            self._run.parallel.timeout_s, predicted_step_s=work.step_s
        ).still_s
        if not self._device.done_in_time(result.executed.marks, still_s=still_s):
            raise PeerLostError(
                f"step {step + 1}: waiting for this rank's device, which waits for another rank: "
                f"timed out after {still_s:g} s"
            )

    def _planned(self, step: int, display: TrainingDisplay) -> StepWork:
        """Return the work of a step, the same on all ranks of this replica; say what went wrong.

        Raises:
            ValueError: ranks have planned it differently.
            StepTooLargeError: on every rank, where no plan of one replica fits.
        """
        work, problem = None, None
        try:
            work = self._source.work(step, consumed=self._consumed)
        except MemoryError as error:
            problem = str(error)
        note = "" if work is None else work.planning_note
        told = self._peers.all_gather((problem, note))
        for rank, (_, said) in enumerate(told):
            if said:
                where = f"rank {rank}: " if self._ranks.mesh.is_distributed else ""
                self._say(f"step {step + 1}: {where}{said}", display)
        for problem, _ in told:
            if problem is not None:
                raise StepTooLargeError(f"step {step + 1}: {problem}")
        assert work is not None, "a step without a problem has work"
        if work.planned is not None:
            self._ranks.check_same_on_all_ranks(
                f"division of the samples of step {step + 1}", work.division_digest
            )
            self._ranks.check_same_in_replica(f"plan of step {step + 1}", work.planned.digest)
        return work

    def _num_actions(self, work: StepWork) -> int:
        """Return how many actions this rank has in a step."""
        program = work.planned.program if work.planned else self._schedule
        return len(program.programs[self._ranks.mesh.at.pipeline])

    def _input(self, work: StepWork) -> StepInput:
        """Return what this replica trains on, with the valid labels of all replicas."""
        (num_valid,) = self._peers.total(
            [sum(data.num_valid for data in work.sequences) * self._speaks_for_replica]
        )
        return StepInput(work.sequences, work.boundaries, int(num_valid), work.for_engine)

    @property
    def _speaks_for_replica(self) -> bool:
        """Whether this rank tells what all ranks of its replica know."""
        at = self._ranks.mesh.at
        return at.pipeline == at.sequence == 0

    def _names(self, own: Sequence[str]) -> list[str]:
        """What any rank names."""
        return sorted({name for names in self._peers.all_gather(own) for name in names})

    def _measure(self, step: int, done: DoneStep, work: StepWork) -> StepMetrics:
        """The figures of a step, the same on every rank.

        Times, memory and waits are those of the rank with most of each; what was offloaded, and
        what host and disk hold, is added up over all ranks.
        """
        outcome, result, copies = self._outcome, done.result, done.copies
        outcome.copies.append(copies)
        own_peak = self._device.peak_bytes()
        outcome.peak_bytes = max(outcome.peak_bytes, own_peak)
        forward_s, backward_s, rest_s, seconds, peak, exposed_s, predicted_s, planning_wait_s = (
            self._peers.largest(
                [
                    result.forward_s,
                    result.backward_s,
                    done.rest_s,
                    done.seconds,
                    own_peak,
                    copies.exposed_s,
                    work.step_s,
                    work.planning_wait_s,
                ]
            )
        )
        offloaded, host_bytes, disk_bytes = self._peers.total(
            [copies.total_out_bytes, copies.host_bytes, copies.disk_bytes]
        )
        outcome.phases.append(StepPhases(forward_s, backward_s, rest_s))
        outcome.planned_phases.append(work.phases)
        if outcome.most_planned is None or (
            work.memory.total_bytes > outcome.most_planned.total_bytes
        ):
            outcome.most_planned = work.memory
        tokens, model_flops, executed_flops = (
            int(value)
            for value in self._of_replicas(work.tokens, work.model_flops, work.executed_flops)
        )
        return StepMetrics(
            step=step + 1,
            loss=done.sums.loss,
            grad_norm=done.sums.norm,
            lr=self._scheduled_lr(step),
            tokens=tokens,
            labels=done.sums.num_valid,
            step_s=seconds,
            tokens_per_s=tokens / seconds,
            mfu=model_flops / seconds / self._peak_flops_per_s,
            hfu=executed_flops / seconds / self._peak_flops_per_s,
            predicted_step_s=predicted_s,
            device_peak_bytes=int(peak),
            host_peak_bytes=int(host_bytes),
            offloaded_bytes=int(offloaded),
            exposed_copy_s=exposed_s,
            copy_out_bytes_per_s=copies.out_bytes_per_s or None,
            copy_back_bytes_per_s=copies.back_bytes_per_s or None,
            disk_peak_bytes=int(disk_bytes),
            skipped=done.lr is None,
            **self._packing(work, done, planning_wait_s=planning_wait_s),
            **self._source.learn(work, done),
        )

    def _packing(self, work: StepWork, done: DoneStep, *, planning_wait_s: float) -> dict[str, Any]:
        """Return how the samples of all replicas are packed, and how pipelines idle; {} without."""
        plan = work.planned
        if plan is None:
            return {}
        busy_s = done.result.forward_s + done.result.backward_s
        actions_s = done.seconds - done.rest_s
        (busy_s, actions_s) = self._peers.total([busy_s, actions_s])
        samples, split, batched, hybrid, padding, bubble = self._of_replicas(
            plan.num_samples,
            plan.num_split,
            plan.num_batched,
            plan.num_hybrid,
            plan.packed.padding_tokens,
            plan.bubble_fraction,
        )
        replicas = self._ranks.mesh.shape.data_parallel
        return {
            "samples": int(samples),
            "split_subsequences": int(split),
            "batched_subsequences": int(batched),
            "hybrid_subsequences": int(hybrid),
            "padding_tokens": int(padding),
            **self._bubbles(bubble / replicas, 1 - busy_s / actions_s),
            "planning_wait_s": planning_wait_s,
            "program_digest": self._peers.broadcast(plan.program.digest()),
        }

    def _bubbles(self, planned: float, measured: float) -> dict[str, float]:
        """Return the idle share of pipeline ranks, of a pipeline."""
        if self._ranks.mesh.shape.pipeline_parallel == 1:
            return {}
        return {"planned_bubble_fraction": planned, "bubble_fraction": max(0.0, measured)}

    def _of_replicas(self, *values: float) -> Sequence[float]:
        """Add up what every replica has of each."""
        return self._peers.total([value * self._speaks_for_replica for value in values])

    def _line(self, metrics: StepMetrics, started: float) -> str:
        here = metrics.step - self._outcome.first_step
        eta_s = (time.perf_counter() - started) / here * (self._run.train.steps - metrics.step)
        return step_line(
            metrics,
            total_steps=self._run.train.steps,
            memory_capacity_bytes=self._capacity_bytes,
            eta_s=eta_s,
        )

    def _record(
        self,
        metrics: StepMetrics,
        sinks: Sequence[MetricSink],
        display: TrainingDisplay,
        *,
        line: str,
    ) -> None:
        """Write and show a step; a failure ends the run after it, once the state is saved."""
        with self._recording(str(self._outcome.output / METRICS_FILE)):
            for sink in sinks:
                sink.write(metrics)
        with self._recording(_STANDARD_OUTPUT):
            display.step_done(line)

    def _say(self, text: str, display: TrainingDisplay) -> None:
        """Print a line, from within a step as well: a failure ends the run only after it."""
        with self._recording(_STANDARD_OUTPUT):
            display.say(text)

    @contextmanager
    def _recording(self, where: str) -> Iterator[None]:
        """Remember the first failure to write, which ends the run once the state is saved."""
        try:
            yield
        except OSError as error:
            named = OSError(error.errno, error.strerror, error.filename or where)
            self._unrecorded = self._unrecorded or named

    def _save_if_due(self, done: int, display: TrainingDisplay) -> None:
        every = self._run.checkpoint.every
        # While steps fail nothing changes, and what led there may be in the weights already:
        # saving it would push out checkpoints from before.
        if every and done % every == 0 and not self._guard.failing:
            self._save(display)

    def _saves_now(self) -> bool:
        """Return whether a run that ends here is to be saved; all ranks ask."""
        if self._run.checkpoint.at_end or self._outcome.done_steps < self._run.train.steps:
            return True
        return any(self._peers.all_gather(self._unrecorded is not None))

    def _save_if_first(self, display: TrainingDisplay) -> None:
        """Save a run that ends badly where all of it would be lost otherwise."""
        self._manager.wait()
        directory = self._manager.directory
        if self._ranks.decided_by_main(lambda: not list_checkpoints(directory)):
            self._save(display)

    def _save(self, display: TrainingDisplay) -> str | None:
        """Save a checkpoint unless the state contains NaN or inf; return why it was not saved."""
        output = self._outcome.output
        self._ranks.decided_by_main(lambda: require_output(output))
        done, state = self._outcome.done_steps, self._state.optimizer.state()
        problems = [p for p in self._peers.all_gather(nonfinite_state(state)) if p is not None]
        if problems:
            unsaved = f"the state after step {done} is not saved; {problems[0]}"
            self._say(unsaved, display)
            return unsaved
        metadata = run_metadata(
            self._run,
            sequences_consumed=self._consumed,
            tokens_sha256=self._data.data.meta.tokens_sha256,
            more=self._source.saved(),
        )
        self._manager.save(self._state.sharded.saved(state), step=done, metadata=metadata)
        self._state.tensors.forget()
        return None

    def _sinks(self, stack: ExitStack) -> Iterator[MetricSink]:
        """What takes the metrics of every step, closed with ``stack``."""
        output, done = self._outcome.output, self._outcome.first_step
        yield stack.enter_context(closing(JsonlSink(output / METRICS_FILE, resume_step=done)))
        if self._run.train.tensorboard:
            sink = TensorBoardSink(output / TENSORBOARD_DIRECTORY, resume_step=done)
            yield stack.enter_context(closing(sink))
