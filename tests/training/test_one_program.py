"""Planned, simulated and executed programs are the same: equal digests in every schedule."""

import pytest

from sppo.hardware.presets import PRESETS
from sppo.planning.plan import check_program
from sppo.planning.run_plan import plan_run
from sppo.schedule.actions import ActionKind
from sppo.schedule.orders.names import (
    LOOPED,
    WHOLE_SEQUENCES,
    WITH_VIRTUAL_STAGES,
    schedule_names,
)
from tests.make import make_run
from tests.random_training.emulated_ranks import run_emulated
from tests.tiers import each_once
from tests.training.jobs import execute_step

RANKS = 2
MODEL = {
    "vocab_size": 17,
    "hidden_size": 16,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_size": 24,
}


def run_of(schedule, policy, disk):
    """A pipeline; what is not retained is offloaded to a disk, or K and V computed again."""
    offloads = policy == "offload_all"
    looped = "offload" if offloads else "recompute"
    whole = schedule in WHOLE_SEQUENCES
    return make_run(
        MODEL,
        length=96,
        sequence={"num_subsequences": 1 if whole else 3, "alignment": 1},
        parallel={
            "data_parallel_degree": 1,
            "pipeline_parallel_degree": RANKS,
            "sequence_parallel_degree": 1,
            "schedule": schedule,
            "virtual_stages": 2 if schedule in WITH_VIRTUAL_STAGES else 1,
        },
        activations={
            "policy": policy,
            "kv": looped if schedule == LOOPED else "auto",
            **({"disk": str(disk), "tier": "disk"} if offloads else {}),
        },
        train={"dtype": "fp32", "sequences_per_step": 2},
    )


@pytest.mark.parametrize(
    ("schedule", "policy"), each_once(schedule_names(), ["keep_attention", "offload_all"])
)
def test_planned_simulated_and_executed_programs_are_one(schedule, policy, tmp_path):
    run = run_of(schedule, policy, tmp_path)
    room = {"available_bytes": 1 << 34, "disk_bytes": 1 << 34}
    plan = plan_run(run, hardware=PRESETS["laptop-cpu"], **room)
    check_program(plan)
    simulated, _ = plan.evaluated().case()
    done = dict(run_emulated(execute_step, run, plan, ranks=RANKS, seed=0))
    executed = simulated.with_programs([done[place] for place in range(RANKS)])
    assert executed.digest() == simulated.digest() == plan.program_digest
    kinds = {action.kind for program in executed.programs for action in program}
    offloads = policy == "offload_all"
    assert (ActionKind.D2H in kinds) == (ActionKind.H2D in kinds) == offloads
    assert (ActionKind.KV in kinds) == (schedule == LOOPED and not offloads)
