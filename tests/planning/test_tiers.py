"""Activations and training state in tiers after the device: one tier each, counted apart."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.cost.stages.links import copy_bytes_per_s
from sppo.hardware.presets import PRESETS
from sppo.output_file import write_json
from sppo.planning.make_plan import make_plan
from sppo.planning.plan import check_program, plan_json, read_plan
from sppo.planning.run_plan import plan_run
from sppo.planning.search.choices import Degrees
from sppo.planning.search.solver import solve
from sppo.schedule.simulation.simulate import simulate
from sppo.units import GIB
from tests.planning.cases import candidate_of_subsequences, machine, price, run_config
from tests.tiers import exhaustive

H100 = PRESETS["h100"]
DISK_RATES = {"disk_write_bytes_per_s": 3e9, "disk_read_bytes_per_s": 5e9}
DISK = {"disk": "spill"}


def one_gpu(*, device=16, host=64, disk=64):
    """A node of one GPU, with so many GiB on and behind it."""
    return machine(
        H100,
        num_devices=1,
        memory_bytes=device * GIB,
        reserved_bytes=0,
        host_memory_bytes=round(host * GIB),
        disk_bytes=round(disk * GIB),
        **DISK_RATES,
    )


def request(length="128Ki", *, activations=None, state=None, **sections):
    """A request with few choices beside the tiers, so that it is answered soon."""
    return run_config(
        "llama-3.2-1b",
        length=length,
        sequence={"num_subsequences": 16},
        parallel={"virtual_stages": 8},
        activations={**DISK, **(activations or {})},
        state=state or {},
        **{"hardware": {"preset": "h100", "devices_per_node": 1}, **sections},
    )


@settings(max_examples=10)
@given(
    device=st.integers(8, 40),
    host=st.sampled_from((0, 3, 12, 17, 24, 64)),
    disk=st.sampled_from((0, 2, 8, 24, 64)),
    tier=st.sampled_from(("auto", "auto", "device", "host", "disk")),
    saves=st.booleans(),
)
def test_neither_tier_is_ever_overfull(device, host, disk, tier, saves):
    hardware = one_gpu(device=device, host=host, disk=disk)
    run = request(activations={"tier": tier}, checkpoint={"async_save": saves})
    if {"host": host, "disk": disk}.get(tier) == 0:
        with pytest.raises(ValueError, match=f"activations.tier={tier}"):
            solve(run, hardware=hardware)
        return
    best = solve(run, hardware=hardware).best
    if best is None:
        return
    (held,), candidate = best.memory, best.candidate
    on_disk = held.tier_activations_bytes * (candidate.tier == "disk")
    in_host = held.tier_activations_bytes * (candidate.tier == "host")
    in_host += held.host_optimizer_bytes + held.tier_gradients_bytes + held.tier_weights_bytes
    in_host += held.staging_bytes + held.background_save_bytes
    assert (best.disk_peak_bytes, best.host_peak_bytes) == (on_disk, in_host)
    assert on_disk <= disk * GIB
    assert in_host <= host * GIB
    assert held.device.total_bytes <= device * GIB
    assert (held.background_save_bytes > 0) == saves
    assert (held.staging_bytes > 0) == (on_disk > 0)
    assert tier in ("auto", candidate.tier)


@pytest.mark.parametrize("host", [24, *exhaustive(17, 64)])
def test_a_disk_is_taken_where_host_memory_alone_is_too_small(host):
    hardware = one_gpu(host=host)
    found = solve(request(), hardware=hardware).best
    near = solve(request(activations={"tier": "host"}), hardware=hardware).best
    assert found.candidate.tier == ("disk" if near is None else "host")
    assert found.candidate.state.tier == "host"
    unnamed = solve(request(activations={"disk": None}), hardware=hardware).best
    assert (unnamed is None) == (near is None)


def test_a_plan_says_which_tier_and_runs_as_it_was_solved(tmp_path):
    run = request()
    best = solve(run, hardware=one_gpu(host=16)).best
    assert best.candidate.tier == "disk"
    assert best.candidate.state.leaves_device
    plan = make_plan(run, best)
    write_json(tmp_path / "plan.json", plan_json(plan))
    again = read_plan(tmp_path / "plan.json")
    assert again == plan
    check_program(again)
    assert again.candidate().tier == again.activation_tier == "disk"
    (host,), (disk,) = (again.rank_tier_buckets(place) for place in ("host", "disk"))
    assert sum(host.values()) == again.predicted.host_peak_bytes == best.host_peak_bytes
    assert sum(disk.values()) == again.predicted.disk_peak_bytes == best.disk_peak_bytes > 0
    schedule, costs = again.evaluated().case()
    played = simulate(schedule, costs=costs)
    assert played.makespan_s == pytest.approx(plan.predicted.step_s)


def candidate(*, tier="disk", state="host", hardware=None):
    run = request(
        activations={"tier": tier, "policy": "offload_all"},
        state={"optimizer": state, "gradients": state, "weights": state},
    )
    return candidate_of_subsequences(
        run,
        hardware=hardware or one_gpu(),
        degrees=Degrees(1, 1, 1),
        num_subsequences=16,
        virtual_stages=8,
    )


def test_the_slowest_part_of_the_way_to_a_tier_counts():
    assert copy_bytes_per_s(candidate()) == (3e9, 5e9)
    fast = machine(one_gpu(), disk_write_bytes_per_s=1e12, disk_read_bytes_per_s=1e12)
    to_host = fast.node.d2h_bytes_per_s, fast.node.h2d_bytes_per_s
    assert copy_bytes_per_s(candidate(hardware=fast)) == to_host
    engines = price(candidate()).state_copies
    assert (engines.d2h_bytes_per_s, engines.h2d_bytes_per_s) == to_host
    assert price(candidate(tier="host")).state_copies is None
    assert price(candidate(state="device")).state_copies is None
    shared = machine(one_gpu(), num_devices=8, host_memory_bytes_per_s=8e9)
    assert copy_bytes_per_s(candidate(tier="host", hardware=shared)) == (1e9, 1e9)


def test_each_tier_that_is_short_is_said_with_what_is_in_it():
    run = request(
        activations={"tier": "disk", "policy": "offload_all"}, state={"optimizer": "host"}
    )
    room = {"hardware": one_gpu(), "available_bytes": 64 * GIB}
    with pytest.raises(MemoryError, match=r"offloaded act.* of activations\.disk=spill than"):
        plan_run(run, host_bytes=64 * GIB, disk_bytes=GIB, **room)
    limited = run.activations.model_copy(update={"disk_memory": GIB})
    limited = run.model_copy(update={"activations": limited})
    with pytest.raises(MemoryError, match=r"raise activations\.disk_memory, or name a directory"):
        plan_run(limited, host_bytes=64 * GIB, disk_bytes=GIB, **room)
    little = {**room, "available_bytes": GIB}
    with pytest.raises(MemoryError, match=r"larger disk; device memory is short, too, by"):
        plan_run(limited, host_bytes=64 * GIB, disk_bytes=GIB, **little)
    with pytest.raises(
        MemoryError, match=r"optimizer states .* in front of the disk .*state\.optimizer"
    ):
        plan_run(run, host_bytes=GIB, disk_bytes=128 * GIB, **room)
