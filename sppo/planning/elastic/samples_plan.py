"""Execution plan of a run of samples, made for the longest samples and compared on first steps.

A step of the longest samples has few subsequences and a long bubble, which several stages on a rank
shorten. Most steps have many short samples, which fill the pipeline by themselves; for them,
several stages only add messages. The number of stages on a rank is therefore chosen by predicting
the first steps of the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from sppo.config.run import RunConfig
from sppo.hardware.description import HardwareSpec
from sppo.planning.elastic.step_planner import step_planner
from sppo.planning.plan import ExecutionPlan
from sppo.planning.run_plan import plan_run

STEPS = 2
"""Number of steps of samples on which plans are compared."""


def plan_samples(
    run: RunConfig,
    *,
    steps: Sequence[Sequence[int]],
    hardware: HardwareSpec,
    available_bytes: int,
    disk_bytes: int = 0,
    host_bytes: int = 0,
) -> ExecutionPlan:
    """Plan a run of samples on a machine with the given free memory.

    Args:
        run: Validated configuration of the run with its longest samples as sequences.
        steps: Tokens of each sample of the first steps, of all replicas.
        hardware: Description of the machine; its memory sizes are ignored.
        available_bytes: Free memory of one device.
        disk_bytes: Bytes that the run may use of the disk of `activations.disk`.
        host_bytes: Host memory that one device may use; 0 on a CPU, whose device memory is the
            host's.

    Raises:
        ValueError: The run asks for a tier that the machine does not have.
        MemoryError: The run does not fit; the message says what to change.
    """

    def planned(asked: RunConfig) -> ExecutionPlan:
        return plan_run(
            asked,
            hardware=hardware,
            available_bytes=available_bytes,
            disk_bytes=disk_bytes,
            host_bytes=host_bytes,
        )

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
