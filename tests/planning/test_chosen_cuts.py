"""Training cuts sequences as is estimated where a run leaves the number of subsequences out."""

from __future__ import annotations

import random

import pytest

from sppo.config.run import RunConfig
from sppo.hardware.run_hardware import hardware_for
from sppo.planning.estimate import estimate
from sppo.planning.run_plan import USABLE_FRACTION, plan_run
from tests.planning.cases import run_config
from tests.tiers import default_of


def some_run(dice: random.Random) -> RunConfig:
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


@pytest.mark.parametrize("seed", default_of(range(24), 1, 3, 9, 13))
def test_training_cuts_as_estimated(seed: int):
    """Where as much is free as the machine has."""
    run = some_run(random.Random(f"cuts {seed}"))
    hardware = hardware_for(run.hardware)
    estimated = estimate(run, hardware=hardware).evaluated
    usable = hardware.device.usable_bytes
    free = int(usable / USABLE_FRACTION) + 1 if run.activations.policy == "auto" else usable
    room = {"available_bytes": free, "host_bytes": hardware.host_bytes_per_device}
    if estimated.shortfall is not None:
        with pytest.raises(MemoryError):
            plan_run(run, hardware=hardware, **room)
        return
    lengths = estimated.candidate.lengths
    trained = plan_run(run, hardware=hardware, **room).lengths
    assert trained == lengths
