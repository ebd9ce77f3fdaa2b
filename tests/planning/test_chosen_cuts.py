"""The solver chooses the number of subsequences that a run leaves out, in every command."""

from __future__ import annotations

import random

import pytest

from sppo.hardware.description import HardwareSpec
from sppo.hardware.run_hardware import hardware_for
from sppo.planning.estimate import estimate
from sppo.planning.run_plan import USABLE_FRACTION, executed_candidate, plan_run
from sppo.planning.search.solver import solve
from tests.planning.cases import run_config
from tests.tiers import default_of


def some_run(dice: random.Random):
    """A run with all its degrees, which leaves its cuts open."""
    stages, group = dice.choice([(1, 1), (2, 1), (1, 8), (4, 2), (8, 1)])
    parallel = {
        "data_parallel_degree": 1,
        "pipeline_parallel_degree": stages,
        "sequence_parallel_degree": group,
        "schedule": dice.choice(["auto", "auto", "sppo", "seq_zb_h1", "1f1b"]),
        "multiplexed": "off",
    }
    return run_config(
        dice.choice(["llama-3.2-1b", "qwen3-1.7b"]),
        length=f"{dice.choice([8, 40, 96, 200])}Ki",
        train={"sequences_per_step": dice.choice([1, 1, 3])},
        parallel=parallel,
        sequence={"partition": dice.choice(["auto", "length", "flops"])},
        activations={"policy": dice.choice(["auto", "retain", "recompute", "sppo"])},
        hardware={"preset": dice.choice(["a100-40g", "h100"])},
    )


def trained_lengths(run, hardware: HardwareSpec):
    """Cuts that training decides where as much is free as the machine has; None if nothing fits."""
    chosen = run.activations.policy == "auto"
    usable = hardware.device.usable_bytes
    free = int(usable / USABLE_FRACTION) + 1 if chosen else usable
    host = hardware.host_bytes_per_device
    try:
        plan = plan_run(run, hardware=hardware, available_bytes=free, host_bytes=host)
    except MemoryError:
        return None
    return plan.lengths


@pytest.mark.parametrize("seed", default_of(range(24), 1, 3, 9, 13))
def test_every_command_cuts_alike(seed: int):
    run = some_run(random.Random(f"cuts {seed}"))
    hardware = hardware_for(run.hardware)
    best = solve(run, hardware=hardware).best
    estimated = estimate(run, hardware=hardware).evaluated
    assert (estimated.shortfall is None) == (best is not None)
    trained = trained_lengths(run, hardware)
    if best is None:
        assert trained is None
        return
    lengths = best.candidate.lengths
    assert estimated.candidate.lengths == lengths
    schedule, _ = executed_candidate(run, hardware=hardware).case()
    assert schedule.lengths[0] == lengths
    assert trained == lengths
    written = replace_cuts(run, len(lengths))
    assert estimate(written, hardware=hardware).evaluated.candidate.lengths == lengths


def replace_cuts(run, num_subsequences: int):
    sequence = run.sequence.model_copy(update={"num_subsequences": num_subsequences})
    return run.model_copy(update={"sequence": sequence})
