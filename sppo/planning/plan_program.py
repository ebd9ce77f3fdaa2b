"""Candidate, costs and program of one step under a plan."""

from __future__ import annotations

import numpy as np

from sppo.activations.placement import ActivationPlacement
from sppo.cost.candidate import Candidate
from sppo.cost.layer import Workload
from sppo.cost.stage_cost import stage_costs, stage_seconds
from sppo.planning.candidate_program import candidate_program
from sppo.planning.plan import ExecutionPlan
from sppo.schedule.costs import Costs
from sppo.schedule.schedule import Schedule


def plan_program(plan: ExecutionPlan) -> Schedule:
    """Return the program of one step of one data-parallel replica under `plan`."""
    return candidate_program(plan_candidate(plan), costs=plan_costs(plan))


def plan_costs(plan: ExecutionPlan) -> Costs:
    """Return the costs of the actions of one step of one data-parallel replica under `plan`."""
    candidate = plan_candidate(plan)
    return stage_costs(candidate, seconds=stage_seconds(candidate), placement=plan_placement(plan))


def plan_candidate(plan: ExecutionPlan) -> Candidate:
    """Return the candidate that `plan` was made from."""
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
        state=plan.state_tiers,
        activation_tier=plan.tier,
        input_every=plan.run["activations"]["input_every"],
        virtual_stages=plan.virtual_stages,
        kv=plan.kv,
        kv_recomputed=plan.kv_recomputed,
    )


def plan_placement(plan: ExecutionPlan) -> ActivationPlacement:
    """Return the placement of every saved tensor under `plan`."""
    tables = (
        np.array(
            [[getattr(part, name) for part in stage.subsequences] for stage in plan.stages],
            dtype=np.int64,
        )
        for name in ("retained", "offloaded", "recomputed")
    )
    return ActivationPlacement(*tables)


def check_program(plan: ExecutionPlan) -> None:
    """Raise ValueError if the program made here differs from the one that the plan was made for.

    Other versions of SPPO or numpy, or another kind of CPU, may make another program. Plans without
    a program digest are not checked.

    Raises:
        ValueError: The digests differ; the message gives both and says what to do.
    """
    if plan.program_digest is None:
        return
    digest = plan_program(plan).digest()
    if digest != plan.program_digest:
        raise ValueError(
            f"the plan is for a program with digest {plan.program_digest[:12]}, and here it makes "
            f"one with {digest[:12]}: another version of SPPO or numpy, or another kind of CPU, "
            "made it. Make it again with sppo solve"
        )
