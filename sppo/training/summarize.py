"""Summary of a run from its recorded steps, its plan, and what its last process measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from statistics import median

from sppo.cost.memory.tier_memory import SAVED_IN_BACKGROUND
from sppo.cost.stage_cost import copy_bytes_per_s
from sppo.offload.copy_report import CopyReport
from sppo.planning.plan import ExecutionPlan
from sppo.planning.plan_program import plan_candidate
from sppo.report.metrics import StepMetrics
from sppo.report.run_summary import (
    CopiesSummary,
    Pair,
    RankPair,
    RunSummary,
    TimelineSummary,
    run_summary,
)
from sppo.training.checks.preflight import CheckedRun
from sppo.training.executed_step import StepTimelines
from sppo.training.outcome import TrainingOutcome
from sppo.training.steps.measured import predicted_and_measured


def summarize(
    steps: Sequence[StepMetrics], checked: CheckedRun, outcome: TrainingOutcome
) -> RunSummary:
    """Return the summary of a run, with figures of its last step if a timeline was measured.

    Args:
        steps: Metrics of all steps of the run.
        checked: Result of the checks of the same run.
        outcome: Outcome of training.
    """
    plan, last = checked.plan, outcome.timelines
    summary = run_summary(
        steps,
        name=outcome.output.name,
        wall_s=outcome.wall_s,
        memory_bytes=_memory(outcome),
        phases_s=_phases(outcome),
    )
    return replace(
        summary,
        predicted_for=plan.hardware.name_and_origin,
        attention=checked.attention,
        copies=copies_summary(plan, outcome.copies),
        interrupted_by=outcome.interrupted_by,
        program_digest=None if last is None else last.measured.schedule.digest(),
        timeline=None if last is None else _timeline_summary(last),
    )


def _memory(outcome: TrainingOutcome) -> Mapping[str, Pair]:
    """Return (predicted, measured) bytes by bucket; {} if no step was run."""
    if outcome.most_planned is None:
        return {}
    all_bytes = outcome.peak_bytes - outcome.base.held_bytes + outcome.base.warm_up_bytes
    buckets = predicted_and_measured(
        outcome.most_planned, outcome.buckets, all_bytes=all_bytes - outcome.file_bytes
    )
    return {name: Pair(*values) for name, values in buckets.items()}


def _phases(outcome: TrainingOutcome) -> dict[str, Pair]:
    """Return (predicted, measured) median seconds of each phase; {} if no step was run."""
    if not outcome.phases:
        return {}
    fields = {"forward": "forward_s", "backward": "backward_s", "data and update": "rest_s"}
    planned, measured = outcome.planned_phases, outcome.phases
    return {
        phase: Pair(median(map(attrgetter(name), planned)), median(map(attrgetter(name), measured)))
        for phase, name in fields.items()
    }


def copies_summary(plan: ExecutionPlan, reports: Sequence[CopyReport]) -> CopiesSummary | None:
    """Return the figures of one step's copies.

    Returns None if the plan offloads nothing, or no step was run.

    Args:
        plan: Plan of the run.
        reports: Report of each step of this process. Rates and times are medians over the steps,
            bytes those of the last step.
    """
    if not plan.offloads_anything or not reports:
        return None
    last, predicted = reports[-1], plan.predicted
    out, back = copy_bytes_per_s(plan_candidate(plan))
    host_bytes = max(
        sum(buckets.values()) - buckets[SAVED_IN_BACKGROUND]
        for buckets in plan.rank_tier_buckets("host")
    )
    return CopiesSummary(
        out_bytes=dict(last.out_bytes),
        back_bytes=dict(last.back_bytes),
        out_bytes_per_s=Pair(out, median(report.out_bytes_per_s for report in reports)),
        back_bytes_per_s=Pair(back, median(report.back_bytes_per_s for report in reports)),
        exposed_s=Pair(predicted.exposed_copy_s, median(report.exposed_s for report in reports)),
        host_bytes=Pair(host_bytes, last.host_bytes),
        disk_bytes=Pair(predicted.disk_peak_bytes, last.disk_bytes),
    )


def _timeline_summary(step: StepTimelines) -> TimelineSummary:
    """Return the figures of the last step of a run.

    The measured `idle_fraction` includes waits for copies, as the simulated one does; the measured
    `bubble_fraction` counts only the gaps between actions.
    """
    planned, measured = step.planned, step.measured
    step_s = len(measured.ranks) * measured.makespan_s
    exposed = sum(step.exposed_copy_s) / step_s if step_s else 0.0
    planned_waits_s = tuple(track.idle_s("copy") for track in planned.ranks)
    return TimelineSummary(
        idle_fraction=Pair(planned.bubble_fraction, measured.bubble_fraction + exposed),
        exposed_copy_s_by_rank=RankPair(planned_waits_s, step.exposed_copy_s),
        pipeline_ranks=len(measured.ranks),
        makespan_s=Pair(planned.makespan_s, measured.makespan_s),
        with_measured_compute_s=step.with_measured_compute_s,
        bubble_fraction=Pair(planned.bubble_fraction, measured.bubble_fraction),
    )
