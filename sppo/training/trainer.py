"""Training of a run: builds or loads the state, runs the steps, and returns their outcome."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from sppo.config import RunConfig
from sppo.output_file import write_json
from sppo.planning.plan import plan_json
from sppo.schedule.simulation.measured_compute import step_seconds
from sppo.schedule.simulation.simulate import simulate
from sppo.training.checks.preflight import CheckedRun
from sppo.training.devices.device import Device
from sppo.training.executed_step import executed_timeline
from sppo.training.job import Job
from sppo.training.outcome import TrainingOutcome
from sppo.training.ranks import Ranks, shared_output
from sppo.training.run_checkpoints import RunCheckpoints
from sppo.training.run_directory import PLAN_FILE, note_configuration
from sppo.training.state import TrainingState, build_state
from sppo.training.state_tensors import DTYPES
from sppo.training.step_loop import StepLoop
from sppo.training.step_metrics import StepMeasures
from sppo.training.step_records import StepRecords
from sppo.training.steps.step_work import StepSource, StepWork, step_source
from sppo.training.steps.warm_up import warm_up

_log = logging.getLogger(__name__)


def train(job: Job, checked: CheckedRun) -> TrainingOutcome:
    """Train until ``train.steps`` steps are done, from the newest checkpoint if there is one.

    Args:
        job: Job that trains the run.
        checked: Result of the checks of the same run.

    Raises:
        ValueError: The output directory is in use, or its checkpoints cannot be read.
        CheckpointError: A checkpoint cannot be written, e.g. because the disk is full; earlier
            checkpoints are untouched.
        NonFiniteError: Too many steps in a row had NaN or inf, or the state at the end has.
        StepTooLargeError: A step of samples does not fit; the state before it is saved.
        OSError: A step could not be recorded; the state is saved.
        PeerLostError: Another rank ended or does not answer.
    """
    started = time.perf_counter()
    base = _baseline(job.run, checked, job.device)
    with shared_output(job.run, job.ranks) as output:
        outcome = _Training(job.run, checked, base, output, job.console, job.ranks).run_steps()
        # The report that follows draws plots in the memory that training used.
        gc.collect()  # the engine's parts refer to each other
        job.device.trim()
    outcome.wall_s = time.perf_counter() - started
    return outcome


@dataclass(frozen=True, slots=True)
class _Baseline:
    """State of a rank's device before the model is built.

    Attributes:
        device: Device of this rank.
        held_bytes: Device memory that the process holds after the warm-up.
        warm_up_bytes: Part of `held_bytes` that the warm-up allocated permanently; 0 on a GPU.
        file_bytes: Resident pages of files before the warm-up; 0 on a GPU.
        capacity_bytes: Device memory that the process may use in total.
        peak_flops_per_s: Measured FLOPs per second of matrix products on this device; None on a
            CPU.
    """

    device: Device
    held_bytes: int
    warm_up_bytes: int
    file_bytes: int
    capacity_bytes: int
    peak_flops_per_s: float | None


def _baseline(run: RunConfig, checked: CheckedRun, device: Device) -> _Baseline:
    device.begin()
    _log.info("%s", device.describe_memory())
    before, files = device.held_bytes(), device.file_bytes()
    # Both calls that follow load libraries, whose memory belongs to the baseline.
    peak_flops_per_s = device.peak_flops_per_s(DTYPES[run.train.dtype])
    warm_up(run, lengths=checked.plan.lengths, device=device)
    held = device.held_bytes()
    return _Baseline(
        device,
        held,
        max(0, held - before) if device.kind == "cpu" else 0,
        files,
        device.capacity_bytes(baseline_bytes=held),
        peak_flops_per_s,
    )


@dataclass(frozen=True, slots=True)
class _Training:
    """One call of :func:`train` on one rank, with the output directory locked.

    Attributes:
        run: Validated run configuration.
        checked: Result of the checks of the same run.
        base: State of the device before the model is built.
        output: Output directory of the run.
        console: Console for the progress display.
        ranks: Ranks that train the run together.
    """

    run: RunConfig
    checked: CheckedRun
    base: _Baseline
    output: Path
    console: Console
    ranks: Ranks

    def run_steps(self) -> TrainingOutcome:
        """Build the state, load the newest checkpoint if there is one, and run the steps left."""
        run, ranks, plan, data = self.run, self.ranks, self.checked.plan, self.checked.data
        state = build_state(run, plan=plan, mesh=ranks.mesh, device=self.base.device)
        # Failures are recorded first: closing the state may wait for a device that hangs.
        with closing(state), ranks.progress.failing():
            checkpoints = RunCheckpoints(
                run, state, output=self.output, ranks=ranks, tokens=data.data
            )
            first_step, metadata = checkpoints.resume()
            self._write_plan(first_step)
            outcome = self._new_outcome(first_step, state)
            source = step_source(run, data, plan=plan, ranks=ranks, metadata=metadata)
            loop = self._loop(state, outcome, source, checkpoints, metadata)
            with closing(source), ranks.progress.failing():
                loop.run()
            outcome.file_bytes = max(0, self.base.device.file_bytes() - self.base.file_bytes)
            _add_last_step(outcome, source, loop.last_work, ranks=ranks)
        return outcome

    def _write_plan(self, first_step: int) -> None:
        """Write the run file and, if steps are left, the plan into the output directory."""
        run, output, ranks = self.run, self.output, self.ranks
        ranks.decided_by_main(lambda: note_configuration(run, output))
        if first_step < run.train.steps:
            plan = self.checked.plan
            ranks.decided_by_main(lambda: write_json(output / PLAN_FILE, plan_json(plan)))

    def _new_outcome(self, first_step: int, state: TrainingState) -> TrainingOutcome:
        """Return an outcome without steps, which counts the memory of the state."""
        outcome = TrainingOutcome(
            self.output,
            first_step,
            first_step,
            baseline_bytes=self.base.held_bytes,
            warm_up_bytes=self.base.warm_up_bytes,
        )
        outcome.buckets.count_state(state)
        return outcome

    def _loop(
        self,
        state: TrainingState,
        outcome: TrainingOutcome,
        source: StepSource,
        checkpoints: RunCheckpoints,
        metadata: Mapping[str, Any],
    ) -> StepLoop:
        """Build the loop over the steps that follow the checkpoint with ``metadata``."""
        run, base, ranks, plan = self.run, self.base, self.ranks, self.checked.plan
        return StepLoop(
            run,
            state,
            outcome,
            checkpoints=checkpoints,
            records=StepRecords(
                run,
                self.output,
                first_step=outcome.first_step,
                capacity_bytes=base.capacity_bytes,
                console=self.console,
                ranks=ranks,
            ),
            source=source,
            measures=StepMeasures(
                outcome,
                source,
                ranks=ranks,
                device=base.device,
                peak_flops_per_s=base.peak_flops_per_s,
            ),
            schedule=state.engine.schedule([plan.lengths] * plan.sequences),
            consumed=int(metadata.get("sequences_consumed", 0)),
            ranks=ranks,
            device=base.device,
        )


def _add_last_step(
    outcome: TrainingOutcome, source: StepSource, last: StepWork | None, *, ranks: Ranks
) -> None:
    """Add to `outcome` the timelines of the last step, and its waits for copies. Collective."""
    outcome.timeline = executed_timeline(outcome.last_step, ranks)
    own_s = outcome.copies[-1].exposed_s if outcome.copies else 0.0
    exposed_s = ranks.peers.all_gather(own_s)
    outcome.exposed_copy_s = tuple(exposed_s[rank] for rank in ranks.mesh.pipeline_ranks)
    if outcome.timeline is not None and last is not None:
        case = source.case(last)
        outcome.planned_timeline = simulate(case.schedule, costs=case.costs)
        outcome.with_measured_compute_s = step_seconds(outcome.timeline, costs=case.costs)
