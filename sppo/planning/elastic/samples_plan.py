"""Execution plan of a run of samples, made for the longest samples and compared on first steps.

A step of the longest samples has few subsequences and a long bubble, which several stages on a rank
shorten. Most steps have many short samples, which fill the pipeline by themselves; for them,
several stages only add messages. The number of stages on a rank is therefore chosen by predicting
the first steps of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from sppo.config.run import RunConfig
from sppo.planning.elastic.step_planner import step_planner
from sppo.planning.plan import ExecutionPlan

STEPS = 2
"""Number of steps of samples on which plans are compared."""


def plan_samples(
    run: RunConfig,
    planned: Callable[[RunConfig], ExecutionPlan],
    *,
    steps: Sequence[Sequence[int]],
) -> ExecutionPlan:
    """Plan a run of samples.

    Args:
        run: Validated configuration of the run with its longest samples as sequences.
        planned: Plans a run on the machine at hand, see :func:`sppo.planning.run_plan.plan_run`.
        steps: Tokens of each sample of the first steps, of all replicas.

    Raises:
        ValueError: The run asks for a tier that the machine does not have.
        MemoryError: The run does not fit; the message says what to change.
    """
    plan = planned(run)
    if plan.virtual_stages == 1 or run.parallel.virtual_stages != "auto":
        return plan
    single = run.with_values({"parallel.virtual_stages": 1})
    try:
        # The plan rests on the run as requested, which leaves the number of stages open.
        other = replace(planned(single), run=plan.run)
    except MemoryError:  # one stage may need more memory than several
        return plan
    return min((plan, other), key=lambda one: _seconds(one, steps))


def _seconds(plan: ExecutionPlan, steps: Sequence[Sequence[int]]) -> float:
    """Return the seconds of one replica's steps by quick search; infinity if one does not fit."""
    planner = replace(step_planner(plan), quick=True)
    try:
        divided = [[step[index] for index in planner.divided(step)[0]] for step in steps]
        return sum(planner.plan(lengths).step_s for lengths in divided)
    except MemoryError:
        return math.inf
