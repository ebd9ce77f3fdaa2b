"""K and V: a placement in the run file is a constraint; otherwise the fastest that fits."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from sppo.activations.tensor_classes import X_IN
from sppo.cli.solution.candidate import policy_text
from sppo.config import ConfigError
from sppo.hardware.presets import PRESETS
from sppo.hardware.run_hardware import hardware_for
from sppo.planning.explain import step_parts
from sppo.planning.make_plan import make_plan
from sppo.planning.plan import check_program
from sppo.planning.search.choices import Degrees, virtual_stages_to_try
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.planning.search.solver import solve
from sppo.schedule.transfers.copies import kv_of_turns
from sppo.units import GIB
from tests.planning.cases import candidate_of_subsequences, machine, run_config


def candidate(*, length=262144, virtual_stages=4, pipeline=2, hardware=None, **activations):
    run = run_config("llama-3.2-1b", length=length, activations=activations)
    return candidate_of_subsequences(
        run,
        hardware=hardware or machine(),
        degrees=Degrees(1, pipeline, 1),
        num_subsequences=16,
        virtual_stages=virtual_stages,
    )


@pytest.mark.parametrize("kv", ["offload", "recompute"])
def test_with_one_stage_on_a_rank_nobody_does_without_keys(kv):
    free = run_config("llama-3.2-1b", length=65536)
    asked = run_config("llama-3.2-1b", length=65536, activations={"kv": kv})
    assert virtual_stages_to_try(free, num_ranks=2)[0] == 1
    assert virtual_stages_to_try(asked, num_ranks=2)[0] > 1
    best = solve(asked, hardware=hardware_for(asked.hardware)).best
    assert best.candidate.schedule == "looped_bfs"
    placed = {"offload": "offloaded", "recompute": "recomputed"}[kv]
    assert best.candidate.kv_of_stages[0] == placed
    assert best.costs.kv_offload_bytes.any() == (kv == "offload")
    assert best.costs.kv_recompute_s.any() == (kv == "recompute")


GEMMA = {
    "vocab_size": 32_000, "hidden_size": 2560, "num_layers": 36, "num_heads": 8,
    "num_kv_heads": 4, "head_size": 256, "mlp_size": 10_240, "sliding_window": 1024,
    "layer_types": ["sliding"] * 5 + ["full"],
}  # fmt: skip


def windowed(memory_gib=None, kv="auto"):
    """Best candidate at 128Ki on one device; without a limit, one in which everything fits."""
    run = run_config(
        GEMMA,
        length=131072,
        sequence={"num_subsequences": 8},
        parallel={"virtual_stages": 1, "pipeline_parallel_degree": 1},
        activations={"tier": "device", "kv": kv},
    )
    memory_bytes = (memory_gib or 4096) * GIB
    return evaluate_candidate(
        candidate_of_subsequences(
            run,
            hardware=machine(memory_bytes=memory_bytes, reserved_bytes=0),
            degrees=Degrees(1, 1, 1),
            num_subsequences=8,
        )
    )


def test_layers_with_windows_recompute_keys_in_every_order():
    """Free: if saved tensors would be recomputed otherwise, and that is slower."""
    asked, free = windowed(kv="recompute"), windowed()
    assert asked.candidate.recomputes_windows == (True,)
    assert free.candidate.recomputes_windows == (False,)
    assert asked.step_s > free.step_s
    text = "K and V of layers with a sliding window are recomputed"
    assert (text in policy_text(asked), text in policy_text(free)) == (True, False)
    room = round(asked.memory[0].device.total_bytes / GIB) + 2
    assert windowed(room).candidate.recomputes_windows == (True,)
    kept = windowed(room, kv="retain")
    assert kept.candidate.recomputes_windows == (False,)
    assert windowed(room).step_s < kept.step_s


@pytest.mark.parametrize("how", [{"multiplexed": "on"}, {"schedule": "sppo_msp"}])
def test_ranks_that_share_units_keep_all_keys(how):
    with pytest.raises(ConfigError, match="ranks that share units"):
        run_config(
            GEMMA,
            length=131072,
            parallel={**how, "pipeline_parallel_degree": 2},
            activations={"kv": "recompute"},
        )


def test_recomputed_keys_come_from_inputs_that_stay():
    small = machine(memory_bytes=24 * GIB, reserved_bytes=0)
    hybrid = evaluate_candidate(candidate(kv="recompute", hardware=small))
    assert not hybrid.placement.offloaded.any()
    with pytest.raises(ValueError, match="offloads the layers' inputs"):
        evaluate_candidate(candidate(kv="recompute", policy="offload_all"))


def test_stages_that_recompute_are_spread_over_all_but_the_last():
    assert kv_of_turns("offloaded", recomputed=0, turns=1) == ("retained",)
    assert kv_of_turns("recomputed", recomputed=0, turns=3) == ("recomputed",) * 2 + ("retained",)
    for turns in range(2, 9):
        for count in range(turns):
            placed = kv_of_turns("offloaded", recomputed=count, turns=turns)
            assert (len(placed), placed[-1]) == (turns, "retained")
            assert placed.count("recomputed") == count
            assert placed.count("offloaded") == turns - 1 - count
            gaps = [turn for turn, kv in enumerate(placed) if kv == "recomputed"]
            between = {after - before for before, after in pairwise(gaps)}
            assert max(between, default=0) - min(between, default=0) <= 1


@pytest.fixture(scope="module")
def mixed():
    """A request whose K and V neither fit behind the device nor, with all inputs, on it."""
    run = run_config(
        "llama-3.2-1b",
        length="256Ki",
        sequence={"num_subsequences": 32},
        parallel={"virtual_stages": 16},
        state={"optimizer": "host", "gradients": "host"},
        activations={"tier": "disk", "disk": "spill"},
        hardware={"preset": "h100", "devices_per_node": 1},
    )
    hardware = machine(
        PRESETS["h100"],
        num_devices=1,
        memory_bytes=17 * GIB,
        reserved_bytes=0,
        host_memory_bytes=32 * GIB,
        disk_bytes=11 * GIB,
        disk_write_bytes_per_s=3e9,
        disk_read_bytes_per_s=3e9,
    )
    return run, hardware


def test_some_stages_recompute_their_keys_where_no_one_placement_fits(mixed):
    run, hardware = mixed
    for kv in ("retain", "offload", "recompute"):
        one = run.model_copy(update={"activations": run.activations.model_copy(update={"kv": kv})})
        assert solve(one, hardware=hardware).best is None
    best = solve(run, hardware=hardware).best
    candidate = best.candidate
    assert (candidate.kv, candidate.virtual_stages) == ("offloaded", 16)
    assert 0 < candidate.kv_recomputed < 15
    placed = [candidate.kv_of_stages[stage] for stage in range(16)]
    recomputes = np.array(placed) == "recomputed"
    assert not best.placement.offloaded[recomputes].any()
    assert best.placement.offloaded[~recomputes, :, X_IN].any()
    assert best.costs.kv_recompute_s[recomputes].all()
    assert best.disk_peak_bytes <= 11 * GIB
    assert max(best.simulated_bytes) <= best.device_peak_bytes + 8
    assert best.device_peak_bytes <= 17 * GIB
    plan = make_plan(run, best)
    assert list(plan.kv_of_stages) == placed
    own = plan.candidate()
    assert (own.kv, own.kv_recomputed) == (candidate.kv, candidate.kv_recomputed)
    check_program(plan)
    assert "recomputed on" in policy_text(best)
    for parts in step_parts(best):
        assert sum(parts.values()) == pytest.approx(best.step_s)
