"""The plan of a run of samples: that of a step of the longest ones, judged by its first steps.

A step of the longest samples has few subsequences and a long bubble, which several stages on a rank
shorten. Most steps have many short samples that fill the pipeline by themselves; for them several
stages only add messages. So how many stages a rank has is decided by the first steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from sppo.config.run import RunConfig
from sppo.hardware.description import HardwareSpec
from sppo.planning.elastic.replica_plan import StepRequest, plan_replica
from sppo.planning.elastic.step_plan import StepPlanner, step_planner
from sppo.planning.plan import ExecutionPlan
from sppo.planning.run_plan import plan_run

STEPS = 2
"""Steps of samples by which plans are compared."""


def plan_samples(
    run: RunConfig,
    *,
    steps: Sequence[Sequence[int]],
    hardware: HardwareSpec,
    available_bytes: int,
    disk_bytes: int = 0,
    host_bytes: int = 0,
) -> ExecutionPlan:
    """Decide what a run of samples leaves open, for a machine with so much memory free.

    Args:
        run: as a run of its longest samples, checked.
        steps: tokens of each sample of the steps to judge by, of all replicas.
        hardware: the machine; its memory is not looked at.
        available_bytes: what is free on a device.
        disk_bytes: what may be taken of the disk behind `activations.disk`.
        host_bytes: of host memory, what one device may take; 0 where it is the device's own.

    Raises:
        ValueError: it asks for a tier that is not there.
        MemoryError: it does not fit, with what to change.
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
    single = run.model_copy(
        update={"parallel": run.parallel.model_copy(update={"virtual_stages": 1})}
    )
    try:
        # It rests on what was asked: there, too, the number of stages was left open.
        other = replace(planned(single), run=plan.run, run_digest=plan.run_digest)
    except MemoryError:  # several stages hold less
        return plan
    return min((plan, other), key=lambda one: _seconds(one, steps))


def _seconds(plan: ExecutionPlan, steps: Sequence[Sequence[int]]) -> float:
    """Seconds of steps of samples under a plan, by the small search; no end if one does not fit."""
    planner = replace(step_planner(plan), quick=True)
    try:
        return sum(_step_s(planner, lengths) for lengths in steps)
    except MemoryError:
        return math.inf


def _step_s(planner: StepPlanner, lengths: Sequence[int]) -> float:
    """Seconds of one step of samples, of the first replica."""
    return plan_replica(planner, StepRequest(tuple(lengths)), replica=0).plan.step_s
