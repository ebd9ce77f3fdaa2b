"""Checks that a given plan, made by ``sppo solve``, is for this run and this kind of machine.

Only :func:`check_kind` needs the kind of this machine, for which torch must be loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sppo.config import RunConfig
from sppo.config.rules import broken_rules
from sppo.planning.elastic.longest_samples import run_of_longest_samples
from sppo.planning.plan import ExecutionPlan, check_plan_fits
from sppo.planning.plan_program import check_program

if TYPE_CHECKING:
    from sppo.training.devices.device import DeviceKind


def followed_plan(run: RunConfig, plan: ExecutionPlan) -> RunConfig:
    """Return the run with its degrees of parallelism set to those of a plan.

    Args:
        run: Validated run configuration.
        plan: Plan made by `sppo solve`.

    Raises:
        ValueError: The plan is for another run, or this version cannot follow it.
    """
    check_plan_fits(plan, run_of_longest_samples(run))
    check_program(plan)
    chosen = {
        "data_parallel_degree": plan.data_parallel_degree,
        "pipeline_parallel_degree": plan.pipeline_parallel_degree,
        "sequence_parallel_degree": plan.sequence_parallel_degree,
        "sequence_parallel": plan.sequence_parallel,
    }
    followed = run.model_copy(update={"parallel": run.parallel.model_copy(update=chosen)})
    problems = list(broken_rules(followed))
    if problems:
        first = problems[0]
        raise ValueError(f"with the degrees of the plan, {first.path} {first.value} {first.rule}")
    return followed


def check_kind(plan: ExecutionPlan, *, kind: DeviceKind, source: str) -> None:
    """Raise ValueError if a plan was made for the other kind of device.

    Args:
        plan: Plan to follow.
        kind: Kind of the device that trains the run.
        source: Name of the plan in the error message.

    Raises:
        ValueError: The plan was made for the other kind of device.
    """
    planned = plan.hardware
    if planned.device.kind != kind:
        here, hint = (
            ("the CPU", "hardware.preset=laptop-cpu") if kind == "cpu" else ("a GPU", "its preset")
        )
        raise ValueError(
            f"{source} was made for {planned.name}, and this run is trained on {here}: solve "
            f"again with {hint}, or with a hardware.file of this machine, or keep the plan for "
            "sppo simulate"
        )
