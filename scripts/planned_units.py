"""Predicted seconds of a planned step's units, beside those that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sppo.planning.elastic.step_plan import StepPlan
from sppo.schedule.actions import COMPUTE_KINDS
from sppo.schedule.encoding import NUM_COMPUTE
from sppo.schedule.simulation.measured_compute import ActionSeconds, action_seconds
from sppo.schedule.simulation.simulate import simulate
from sppo.schedule.timeline import Timeline


def simulated_timeline(plan: StepPlan) -> Timeline:
    """Return the simulated timeline of a step."""
    return simulate(plan.program, costs=plan.evaluated.costs)


def planned_seconds(plan: StepPlan) -> ActionSeconds:
    """Return predicted seconds of actions; reductions, to which plans add the update, take none."""
    seconds = action_seconds(simulated_timeline(plan))
    return {(code, slot): s * (code < NUM_COMPUTE) for (code, slot), s in seconds.items()}


def unit_seconds(
    plan: StepPlan, predicted: ActionSeconds, *, measured: Sequence[ActionSeconds]
) -> list[dict[str, Any]]:
    """Return predicted and measured seconds of each forward and backward, summed over stages."""
    sequences = plan.program.lengths
    tokens = [count for sequence in sequences for count in sequence]
    found = []
    for code, kind in enumerate(COMPUTE_KINDS):
        for unit, count in enumerate(tokens):
            keys = [key for key in predicted if key[0] == code and key[1] % len(tokens) == unit]
            if keys:
                turns = [sum(turn[key] for key in keys) for turn in measured]
                found.append(
                    {
                        "kind": kind.value,
                        "unit": unit,
                        "tokens": count,
                        "predicted_s": sum(predicted[key] for key in keys),
                        "measured_s": turns,
                    }
                )
    return found
