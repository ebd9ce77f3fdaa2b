"""Timelines of the last step of a run, planned and measured, for the ranks of one pipeline.

Every rank records the start and the end of its actions by its own clock. Ranks of one machine have
the same clock. The clocks of different machines are aligned at a barrier of all ranks, to about
the latency of the network.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sppo.engine.engine import StepResult
from sppo.planning.plan import ExecutionPlan
from sppo.report.run_summary import Pair, RankPair, TimelineSummary
from sppo.schedule.actions import Action
from sppo.schedule.simulation.simulate import simulate, step_seconds
from sppo.schedule.timeline import Timeline, measured_timeline
from sppo.training.job import Job
from sppo.training.step import StepWork


@dataclass(frozen=True, slots=True)
class StepTimelines:
    """One step of a pipeline's ranks, as planned and as executed."""

    planned: Timeline
    """Simulated timeline."""
    measured: Timeline
    """Measured timeline; a wait for a copy is part of the action that waited."""
    summary: TimelineSummary
    """Figures of both."""


@dataclass(frozen=True, slots=True)
class _RankStep:
    """Executed actions of one rank in a step, with their times; sent to rank 0."""

    host: str
    met_s: float
    """Clock of the rank after the barrier of all ranks, in seconds."""
    actions: tuple[Action, ...]
    """Actions in the order of their execution."""
    times_s: tuple[tuple[float, float], ...]
    """(start, end) of each action on the clock of the rank."""


def step_timelines(
    job: Job,
    plan: ExecutionPlan,
    work: StepWork | None,
    executed: StepResult | None,
    *,
    exposed_copy_s: float,
) -> StepTimelines | None:
    """Return the timelines of the first pipeline in a step on rank 0, None elsewhere. Collective.

    The measured `idle_fraction` includes waits for copies, as the simulated one does; the measured
    `bubble_fraction` counts only the gaps between actions.

    Args:
        job: Job that trains the run.
        plan: Plan of the run.
        work: Work of the step; None if no step was executed.
        executed: Actions that this rank executed; None if no step was executed.
        exposed_copy_s: Seconds that this rank waited for copies.
    """
    if work is None or executed is None:  # on all ranks
        return None
    measured = executed_timeline(executed, job)
    waits_s = job.peers.all_gather(exposed_copy_s)
    if measured is None:
        return None
    if work.samples is None:
        program, costs = plan.evaluated().case()
    else:
        replica = work.samples.plan
        program, costs = replica.program, replica.evaluated.costs
    planned = simulate(program, costs=costs)
    exposed_s = tuple(waits_s[rank] for rank in job.mesh.pipeline_ranks)
    all_ranks_s = len(measured.ranks) * measured.makespan_s
    exposed = sum(exposed_s) / all_ranks_s if all_ranks_s else 0.0
    planned_waits_s = tuple(track.idle_s("copy") for track in planned.ranks)
    summary = TimelineSummary(
        idle_fraction=Pair(planned.bubble_fraction, measured.bubble_fraction + exposed),
        exposed_copy_s_by_rank=RankPair(planned_waits_s, exposed_s),
        pipeline_ranks=len(measured.ranks),
        makespan_s=Pair(planned.makespan_s, measured.makespan_s),
        with_measured_compute_s=step_seconds(measured, costs=costs),
        bubble_fraction=Pair(planned.bubble_fraction, measured.bubble_fraction),
    )
    return StepTimelines(planned, measured, summary)


def executed_timeline(executed: StepResult, job: Job) -> Timeline | None:
    """Return the timeline of the first pipeline in a step on rank 0, None elsewhere. Collective."""
    job.peers.barrier()
    own = _RankStep(
        platform.node(),
        time.perf_counter(),
        tuple(done.action for done in executed.trace),
        tuple((done.start_s, done.finish_s) for done in executed.trace),
    )
    steps = job.peers.all_gather(own)
    if not job.mesh.is_main:
        return None
    return _timeline(executed, [steps[rank] for rank in job.mesh.pipeline_ranks])


def _timeline(executed: StepResult, steps: Sequence[_RankStep]) -> Timeline:
    """Return the timeline of one pipeline's ranks, first to last, on the first rank's clock."""
    first = steps[0]
    offsets = [0.0 if step.host == first.host else step.met_s - first.met_s for step in steps]
    begin = min(
        start - offset
        for step, offset in zip(steps, offsets, strict=True)
        for start, _ in step.times_s
    )
    times = [
        [(start - offset - begin, finish - offset - begin) for start, finish in step.times_s]
        for step, offset in zip(steps, offsets, strict=True)
    ]
    program = executed.schedule.with_programs([step.actions for step in steps])
    return measured_timeline(program, times_s=times)
