"""JSON report of ``sppo solve --json`` with data.samples=documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from sppo.cli.output.solve_json import degrees_report, hardware_report, memory_report, stage_reports
from sppo.cli.output.solve_text import launch_commands
from sppo.planning.advice import Advice
from sppo.planning.corpus.search import (
    CorpusSolution,
    DrawnSteps,
    PlannedDegrees,
    RefusedDegrees,
    fullest_rank,
)
from sppo.planning.corpus.sides import SIDES, deviation, time_deviation
from sppo.planning.elastic.step_plan import StepPlan
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate


def corpus_report(
    solution: CorpusSolution, *, train: str, output: Path | None = None
) -> dict[str, Any]:
    """Return a solution as JSON values; the best division is also the first candidate."""
    assert solution.best is not None, "corpus_failure_report is for the other case"
    best, hardware = solution.best, solution.hardware
    return {
        "feasible": True,
        "corpus": steps_report(solution),
        "best": candidate_report(best, solution.steps),
        "candidates": [
            candidate_report(way, solution.steps) for way in (best, *solution.runners_up)
        ],
        "sides": sides_report(solution),
        "rejected": [refused_report(refused) for refused in solution.refused],
        "searched": {
            "divisions": solution.num_divisions,
            "divisions_planned": solution.num_planned,
        },
        "devices_left_over": hardware.num_devices - best.degrees.num_devices,
        "launch": list(
            launch_commands(
                best.degrees,
                devices_per_node=hardware.node.num_devices,
                train=train,
            )
        ),
        "hardware": hardware_report(hardware),
        "plan": None if output is None else str(output),
    }


def corpus_failure_report(solution: CorpusSolution, *, changes: Sequence[Advice]) -> dict[str, Any]:
    """Return why nothing fits, and which changes would make it fit, as JSON values."""
    return {
        "feasible": False,
        "corpus": steps_report(solution),
        "best": None,
        "candidates": [],
        "nearest": refused_report(solution.refused[0]) if solution.refused else None,
        "advice": [asdict(advice) for advice in changes],
        "rejected": [refused_report(refused) for refused in solution.refused],
        "hardware": hardware_report(solution.hardware),
    }


def steps_report(solution: CorpusSolution) -> dict[str, Any]:
    """Return the drawn steps as JSON values."""
    steps = solution.steps
    return {
        "source": steps.source,
        "description": steps.description,
        "longest_sample": solution.run.sequence.length,
        "steps": [
            {"samples": len(lengths), "tokens": sum(lengths), "longest": max(lengths)}
            for lengths in steps.lengths
        ],
    }


def candidate_report(way: PlannedDegrees, steps: DrawnSteps) -> dict[str, Any]:
    """Return one way to divide the devices as JSON values."""
    rate = steps.num_tokens / way.seconds
    return {
        **degrees_report(way.degrees),
        "virtual_stages": way.longest.candidate.virtual_stages,
        "closed_form_step_s": way.closed_s / len(steps.lengths),
        "step_s": way.seconds / len(steps.lengths),
        "tokens_per_s": rate,
        "tokens_per_s_per_gpu": rate / way.degrees.num_devices,
        "bubble_fraction": way.bubble_fraction,
        "steps": [step_report(plan) for plan in way.plans],
        "memory": fullest_report(way.fullest.evaluated),
        "longest_sample": {
            "num_subsequences": len(way.longest.candidate.lengths),
            "subsequence_lengths": list(way.longest.candidate.lengths),
            "schedule": way.longest.candidate.schedule,
            "policy": way.longest.effective_policy,
            "kv": way.longest.kv,
            "state": asdict(way.longest.candidate.state),
            "memory": fullest_report(way.longest),
            "stages": stage_reports(way.longest),
        },
    }


def step_report(plan: StepPlan) -> dict[str, Any]:
    """Return one drawn step of the replica with the most work as JSON values."""
    evaluated = plan.evaluated
    return {
        "samples": plan.num_samples,
        "tokens": plan.tokens,
        "step_s": plan.step_s,
        "bubble_fraction": plan.bubble_fraction,
        "schedule": evaluated.candidate.schedule,
        "policy": evaluated.effective_policy,
        "chunks": chunks_report(plan),
        "paced": bool(evaluated.candidate.forwards_before_backward),
        "device_peak_bytes": evaluated.device_peak_bytes,
    }


def chunks_report(plan: StepPlan) -> dict[str, Any]:
    """Return statistics of the subsequences of a step as JSON values."""
    lengths = plan.evaluated.candidate.lengths
    return {
        "count": len(lengths),
        "split": plan.num_split,
        "batched": plan.num_batched,
        "hybrid": plan.num_hybrid,
        "least_tokens": min(lengths),
        "median_tokens": int(median(lengths)),
        "most_tokens": max(lengths),
        "time_deviation": time_deviation(plan),
        "length_deviation": deviation(lengths),
    }


def fullest_report(evaluated: EvaluatedCandidate) -> dict[str, Any]:
    """Return the memory of the fullest pipeline rank, by bucket, as JSON values."""
    rank = fullest_rank(evaluated.memory)
    return {"rank": rank, **memory_report(evaluated.memory[rank])}


def sides_report(solution: CorpusSolution) -> dict[str, Any]:
    """Return every way to pack the drawn steps, priced with the best degrees, as JSON values."""
    assert solution.best is not None, "sides are of the best"
    found: dict[str, Any] = {}
    base = None
    plans_of: dict[str, list[StepPlan] | tuple[StepPlan, ...]] = {
        name: [step.plan for step in steps]
        for name, steps in solution.sides.items()
        if not isinstance(steps, str)
    }
    plans_of["elastic"] = solution.best.plans
    if "fixed" in plans_of:
        base = sum(plan.step_s for plan in plans_of["fixed"])
    for name in SIDES:
        if name not in plans_of:
            found[name] = {"fits": False, "reason": solution.sides[name]}
            continue
        plans = plans_of[name]
        seconds = sum(plan.step_s for plan in plans)
        found[name] = {
            "fits": True,
            "step_s": seconds / len(plans),
            "tokens_per_s": solution.steps.num_tokens / seconds,
            "over_fixed": None if base is None else base / seconds,
            "bubble_fraction": sum(plan.bubble_fraction * plan.step_s for plan in plans) / seconds,
            "chunk_tokens": max(max(plan.evaluated.candidate.lengths) for plan in plans),
            "chunks": sum(len(plan.evaluated.candidate.lengths) for plan in plans) / len(plans),
            "time_deviation": median(map(time_deviation, plans)),
            "device_peak_bytes": max(plan.evaluated.device_peak_bytes for plan in plans),
        }
    return found


def refused_report(refused: RefusedDegrees) -> dict[str, Any]:
    """Return one refused division of the devices as JSON values."""
    return {
        **degrees_report(refused.degrees),
        "reason": refused.reason,
        "short_bytes": refused.short_bytes,
        "longest_sample_fits": refused.steps,
    }
