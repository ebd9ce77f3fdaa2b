"""A plan that a run is given: whether it is for this run, and the degrees that it chose."""

from __future__ import annotations

from pathlib import Path

from sppo.config import RunConfig
from sppo.planning.elastic.longest_samples import run_of_longest_samples
from sppo.planning.plan import ExecutionPlan, check_plan_fits, read_plan
from sppo.planning.plan_program import check_program
from sppo.training.devices.device import Kind


def given_plan(
    run: RunConfig, plan_file: Path, *, kind: Kind = "cpu"
) -> tuple[RunConfig, ExecutionPlan]:
    """The plan in ``plan_file``, if it is for this run, and the run with the degrees it chose.

    Raises:
        ValueError: it is no plan; or see :func:`followed_plan`.
    """
    plan = read_plan(plan_file)
    return followed_plan(run, plan, kind=kind, source=str(plan_file)), plan


def followed_plan(run: RunConfig, plan: ExecutionPlan, *, kind: Kind, source: str) -> RunConfig:
    """The run with the degrees of a plan that it can follow.

    Args:
        run: checked.
        plan: of `sppo solve`.
        kind: of the device that the run is trained on.
        source: what errors call the plan.

    Raises:
        ValueError: it is for another run or machine, or this version cannot follow it.
    """
    check_plan_fits(plan, run_of_longest_samples(run))
    check_program(plan)
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
    chosen = {
        "data_parallel_degree": plan.data_parallel_degree,
        "pipeline_parallel_degree": plan.pipeline_parallel_degree,
        "sequence_parallel_degree": plan.sequence_parallel_degree,
        "sequence_parallel": plan.sequence_parallel,
    }
    return run.model_copy(update={"parallel": run.parallel.model_copy(update=chosen)})
