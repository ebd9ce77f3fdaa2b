"""Training of a run: builds or loads the state, runs the steps, and returns their outcome."""

from __future__ import annotations

import gc
import logging
import time
from contextlib import closing
from pathlib import Path

from sppo.output_file import write_json
from sppo.planning.plan import ExecutionPlan, plan_json
from sppo.schedule.simulation.simulate import simulate, step_seconds
from sppo.training.executed_step import StepTimelines, executed_timeline
from sppo.training.job import Job, shared_output
from sppo.training.preflight import CheckedRun
from sppo.training.run_checkpoints import RunCheckpoints
from sppo.training.run_directory import PLAN_FILE, note_configuration
from sppo.training.state import build_state
from sppo.training.state_tensors import DTYPES
from sppo.training.step_loop import StepLoop
from sppo.training.steps.outcome import Baseline, TrainingOutcome
from sppo.training.steps.warm_up import warm_up
from sppo.training.steps.work import StepSource, step_source

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
    base = _baseline(job, checked.plan)
    with shared_output(job.run, job.ranks) as output:
        outcome = _train_into(output, job, checked, base)
        # The report that follows draws plots in the memory that training used.
        gc.collect()  # the engine's parts refer to each other
        job.device.trim()
    outcome.wall_s = time.perf_counter() - started
    return outcome


def _baseline(job: Job, plan: ExecutionPlan) -> Baseline:
    """Warm up the device of this rank, and return its state."""
    run, device = job.run, job.device
    device.begin()
    _log.info("%s", device.describe_memory())
    before, files = device.held_bytes(), device.file_bytes()
    # Both calls that follow load libraries, whose memory belongs to the baseline.
    peak_flops_per_s = device.peak_flops_per_s(DTYPES[run.train.dtype])
    warm_up(run, lengths=plan.lengths, device=device)
    held = device.held_bytes()
    return Baseline(
        held,
        max(0, held - before) if device.kind == "cpu" else 0,
        files,
        device.capacity_bytes(baseline_bytes=held),
        peak_flops_per_s,
    )


def _train_into(output: Path, job: Job, checked: CheckedRun, base: Baseline) -> TrainingOutcome:
    """Build the state, load the newest checkpoint if there is one, and run the steps left.

    Args:
        output: Output directory of the run, which is locked.
        job: Job that trains the run.
        checked: Result of the checks of the same run.
        base: State of the device before the model is built.
    """
    run, ranks, plan = job.run, job.ranks, checked.plan
    state = build_state(job, plan)
    # Failures are recorded first: closing the state may wait for a device that hangs.
    with closing(state), ranks.progress.failing():
        checkpoints = RunCheckpoints(job, state, output=output, tokens=checked.data.data)
        first_step, metadata = checkpoints.resume()
        ranks.decided_by_main(lambda: note_configuration(run, output))
        if first_step < run.train.steps:
            ranks.decided_by_main(lambda: write_json(output / PLAN_FILE, plan_json(plan)))
        outcome = TrainingOutcome(output, base, first_step, first_step)
        outcome.buckets.count_state(state)
        source = step_source(job, checked.data, plan, metadata)
        with closing(source), ranks.progress.failing():
            StepLoop(
                job,
                state,
                outcome,
                checkpoints=checkpoints,
                source=source,
                schedule=state.engine.schedule([plan.lengths] * plan.sequences),
                consumed=int(metadata.get("sequences_consumed", 0)),
            ).run()
        outcome.file_bytes = max(0, job.device.file_bytes() - base.file_bytes)
        outcome.timelines = _last_timelines(outcome, job, source)
    return outcome


def _last_timelines(outcome: TrainingOutcome, job: Job, source: StepSource) -> StepTimelines | None:
    """Return the timelines of the last step on rank 0, if this call ran any. Collective."""
    ranks = job.ranks
    measured = executed_timeline(outcome.last_step, ranks)
    exposed_s = ranks.peers.all_gather(outcome.copies[-1].exposed_s if outcome.copies else 0.0)
    if measured is None or outcome.last_work is None:
        return None
    case = source.case(outcome.last_work)
    return StepTimelines(
        simulate(case.schedule, costs=case.costs),
        measured,
        step_seconds(measured, costs=case.costs),
        tuple(exposed_s[rank] for rank in ranks.mesh.pipeline_ranks),
    )
