"""A run file or a plan as something to simulate: its schedule, and its costs on a machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sppo.activations.placement import ActivationPlacement
from sppo.config.run import RunConfig
from sppo.cost.candidate import Candidate
from sppo.cost.layer import Workload
from sppo.cost.stage_cost import stage_costs, stage_seconds
from sppo.hardware.description import HardwareSpec
from sppo.hardware.file import hardware_for
from sppo.planning.candidate import assess
from sppo.planning.plan import ExecutionPlan
from sppo.planning.run_plan import run_candidate
from sppo.schedule.costs import Costs
from sppo.schedule.generators import WHOLE_SEQUENCES, generate
from sppo.schedule.prepare import Case, lower


@dataclass(frozen=True, slots=True)
class RunShape:
    """What flags replace in a run for a what-if; None keeps the run's own."""

    schedule: str | None = None
    num_ranks: int | None = None
    num_subsequences: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedRun:
    """The simulation of a run.

    Attributes:
        case: Its lowered schedule and costs.
        forward: Its forward alone.
        hardware: The machine it was priced for.
    """

    case: Case
    forward: Case
    hardware: HardwareSpec


def simulated_run(run: RunConfig, *, shape: RunShape | None = None) -> SimulatedRun:
    """What one step of one data-parallel replica of `run` does.

    Raises:
        ValueError: degrees or a schedule that do not fit the run, with what to change.
    """
    shape = shape or RunShape()
    if shape.num_subsequences is not None:
        cut = {"num_subsequences": shape.num_subsequences, "boundaries": None}
        run = run.model_copy(update={"sequence": run.sequence.model_copy(update=cut)})
    if shape.num_ranks is not None:
        degree = {"pipeline_parallel_degree": shape.num_ranks}
        run = run.model_copy(update={"parallel": run.parallel.model_copy(update=degree)})
    hardware = hardware_for(run.hardware)
    name = shape.schedule or _schedule_name(run)
    candidate = replace(run_candidate(run, hardware=hardware), schedule=name)
    if name in WHOLE_SEQUENCES:
        candidate = replace(candidate, lengths=(sum(candidate.lengths),))
    return _simulated(candidate, costs=assess(candidate).costs)


def simulated_plan(plan: ExecutionPlan) -> SimulatedRun:
    """What one step of one data-parallel replica does under `plan`."""
    return _simulated(plan_candidate(plan), costs=plan_costs(plan))


def plan_costs(plan: ExecutionPlan) -> Costs:
    """What the actions of one data-parallel replica cost under `plan`."""
    candidate = plan_candidate(plan)
    return stage_costs(candidate, seconds=stage_seconds(candidate), decisions=plan_decisions(plan))


def plan_candidate(plan: ExecutionPlan) -> Candidate:
    """The candidate that `plan` was made from."""
    workload = Workload(
        plan.model,
        plan.hardware,
        dtype=plan.run["train"]["dtype"],
        sequence_parallel_degree=plan.sequence_parallel_degree,
        sequence_parallel="megatron" if plan.sequence_parallel == "megatron" else "ulysses",
    )
    return Candidate(
        workload,
        plan.lengths,
        sequences=plan.sequences,
        pipeline_parallel_degree=plan.pipeline_parallel_degree,
        data_parallel_degree=plan.data_parallel_degree,
        schedule=plan.schedule,
        policy=plan.policy,
        zero=plan.zero,
        offload_optimizer=plan.run["optimizer"]["offload"] and plan.hardware.device.kind != "cpu",
        input_every=plan.run["activations"]["input_every"],
    )


def plan_decisions(plan: ExecutionPlan) -> ActivationPlacement:
    """What `plan` does to every saved tensor."""
    tables = (
        np.array(
            [[getattr(part, name) for part in stage.subsequences] for stage in plan.stages],
            dtype=np.int64,
        )
        for name in ("retained", "offloaded", "recomputed")
    )
    return ActivationPlacement(*tables)


def _simulated(candidate: Candidate, *, costs: Costs) -> SimulatedRun:
    schedule_of = {
        forward_only: generate(
            candidate.schedule,
            num_ranks=candidate.pipeline_parallel_degree,
            lengths=(candidate.lengths,) * candidate.sequences,
            forward_only=forward_only,
            costs=costs,
        )
        for forward_only in (False, True)
    }
    alone = replace(costs, offload_bytes=np.zeros_like(costs.offload_bytes))
    return SimulatedRun(
        Case(lower(schedule_of[False], costs=costs), costs),
        Case(lower(schedule_of[True], costs=alone), alone),
        candidate.workload.hardware,
    )


def _schedule_name(run: RunConfig) -> str:
    """The run's schedule; "auto" is the SPPO program, cut by MSP where the run asks for it."""
    if run.parallel.schedule != "auto":
        return run.parallel.schedule
    return "sppo_msp" if run.parallel.multiplexed == "on" else "sppo"
