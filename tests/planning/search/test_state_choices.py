"""Tiers of the training state, and the cases in which it leaves the devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sppo.activations.tensor_classes import X_IN
from sppo.cost.memory.state_memory import state_memory
from sppo.cost.state_tiers import ON_DEVICE, StateTiers
from sppo.hardware.presets import PRESETS
from sppo.output_file import write_json
from sppo.planning.make_plan import make_plan
from sppo.planning.plan import check_program, plan_json, read_plan
from sppo.planning.search.choices import Degrees
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.planning.search.solver import solve
from sppo.planning.search.state_choices import state_choices
from tests.planning.cases import candidate_of_subsequences, machine, run_config

H100 = PRESETS["h100"]
HOST = StateTiers(optimizer="host")
LADDER = (
    ON_DEVICE,
    HOST,
    StateTiers(gradients="host", optimizer="host"),
    StateTiers("host", "host", "host"),
)
FROZEN = StateTiers(weights="host")
ADAPTED = {"adapter": {"rank": 4}}
DISK = {"disk": "spill"}
DISK_RATES = {"disk_write_bytes_per_s": 2e9, "disk_read_bytes_per_s": 2e9}


@pytest.mark.parametrize(
    ("state", "others", "expected"),
    [
        ({}, {}, LADDER),
        ({}, {"parallel": {"virtual_stages": 1}}, LADDER[:2]),
        ({}, {"parallel": {"schedule": "seq1f1b"}}, LADDER[:2]),
        ({}, {"parallel": {"multiplexed": "on"}}, LADDER[:2]),
        ({"optimizer": "host"}, {}, LADDER[1:]),
        ({"optimizer": "device"}, {}, LADDER[:1]),
        ({"weights": "device", "gradients": "device"}, {}, LADDER[:2]),
        ({"weights": "host"}, {}, (StateTiers("host", "device", "host"), LADDER[3])),
        ({"weights": "host", "gradients": "host"}, {}, LADDER[3:]),
        ({}, ADAPTED, (ON_DEVICE, FROZEN, *LADDER[1:])),
        ({"optimizer": "device"}, ADAPTED, (ON_DEVICE, FROZEN)),
        ({"weights": "host"}, ADAPTED, (FROZEN, StateTiers("host", "device", "host"), LADDER[3])),
        ({}, {"train": {"only": ["layers.1?.*"]}}, (ON_DEVICE, FROZEN, *LADDER[1:])),
        ({}, {**ADAPTED, "parallel": {"virtual_stages": 1}}, LADDER[:2]),
    ],
    ids=str,
)
def test_the_nearest_place_comes_first(state, others, expected):
    assert state_choices(run_config(state=state, **others), hardware=H100) == expected


def test_state_of_a_cpu_leaves_to_the_disk_that_a_run_names():
    laptop = PRESETS["laptop-cpu"]

    def choices(hardware=laptop, **state):
        return state_choices(run_config(state=state, activations=DISK), hardware=hardware)

    every = StateTiers("disk", "disk", "disk")
    two, one = replace(every, weights="device"), StateTiers(optimizer="disk")
    assert choices() == (ON_DEVICE, one, two, every)
    assert choices(optimizer="host") == choices(optimizer="device") == (ON_DEVICE,)
    assert choices(weights="disk") == (replace(every, gradients="device"), every)
    assert choices(machine(laptop, disk_bytes=0)) == (ON_DEVICE,)


def test_a_machine_without_host_memory_is_named():
    run = run_config("tiny-test", length=256, state={"optimizer": "host"})
    bare = machine(host_memory_bytes=0)
    with pytest.raises(ValueError, match=r"state\.optimizer=host keeps it in host memory, and"):
        solve(run, hardware=bare)


@pytest.mark.parametrize("tier", ["auto", "disk"])
def test_no_state_of_a_gpu_goes_to_a_disk(tier):
    run = run_config(
        "tiny-test",
        length=256,
        state={"optimizer": "disk"},
        activations={"tier": tier, **DISK},
    )
    with pytest.raises(ValueError, match="what leaves a GPU goes to host memory: write host"):
        solve(run, hardware=machine(disk_bytes=1 << 40, **DISK_RATES))


def candidate(tiers, *, virtual=4, tied=False, zero=1, degrees=(1, 1, 1)):
    run = run_config(
        {
            "vocab_size": 1000,
            "hidden_size": 64,
            "num_layers": 8,
            "num_heads": 4,
            "mlp_size": 96,
            "tie_embeddings": tied,
        },
        length=4096,
        parallel={"zero": zero, "schedule": "looped_bfs"},
        train={"sequences_per_step": degrees[0]},
    )
    found = candidate_of_subsequences(
        run, hardware=H100, degrees=Degrees(*degrees), num_subsequences=4, virtual_stages=virtual
    )
    return replace(found, state=tiers)


def held(tiers, **how):
    one = candidate(tiers, **how)
    return state_memory(one)[0]


def test_what_leaves_is_behind_the_device_and_two_stages_are_on_it():
    layer = 4 * 64 * 64 + 3 * 64 * 96 + 2 * 64
    outside, whole = 1000 * 64, 8 * layer + 2 * 1000 * 64 + 64
    near, far = held(ON_DEVICE), held(LADDER[3])
    assert near.tier_state_bytes == 0
    assert near.device.weights_bytes == 2 * whole
    assert near.device.gradients_bytes == 4 * whole
    last_two = 4 * layer + outside + 64
    assert far.device.weights_bytes == 2 * last_two
    assert far.device.gradients_bytes == 4 * last_two
    assert far.device.optimizer_bytes == 0
    assert far.tier_weights_bytes == 2 * whole
    assert far.tier_gradients_bytes == 4 * whole
    assert far.host_optimizer_bytes == 12 * whole


def test_of_a_tied_embedding_both_ends_need_the_weights():
    layer = 4 * 64 * 64 + 3 * 64 * 96 + 2 * 64
    far = held(LADDER[3], tied=True)
    assert far.device.weights_bytes == 2 * (4 * layer + 1000 * 64 + 64)
    assert far.device.gradients_bytes == 4 * (4 * layer + 64 + 1000 * 64)


@pytest.mark.parametrize("zero", [2, 3])
def test_with_shards_the_rows_of_two_stages_are_there(zero):
    degrees = (2, 1, 1)
    near, far = (held(tiers, zero=zero, degrees=degrees) for tiers in (LADDER[1], LADDER[3]))
    whole = held(LADDER[3])
    assert far.tier_gradients_bytes == whole.tier_gradients_bytes // 2
    assert near.device.gradients_bytes > far.device.gradients_bytes
    assert (near.device.weights_bytes > far.device.weights_bytes) or zero == 2


def test_what_does_not_fit_on_the_device_leaves_it_and_the_plan_says_so(tmp_path):
    """Eight bytes of weights and gradients a parameter, on a device that has five."""
    run = run_config(
        {"preset": "llama-3.1-8b", "num_layers": 8},
        length="64Ki",
        hardware={"preset": "h100", "devices_per_node": 1, "host_memory": "1TiB"},
    )
    small = machine(H100, memory_bytes=16 << 30, num_devices=1, host_memory_bytes=1 << 40)
    best = solve(run, hardware=small).best
    assert best is not None
    assert best.shortfall is None
    state = best.candidate.state
    assert state == LADDER[2]
    assert best.candidate.virtual_stages > 1
    nearer = evaluate_candidate(replace(best.candidate, state=LADDER[1]))
    assert nearer.shortfall is not None
    plan = make_plan(run, best)
    write_json(tmp_path / "plan.json", plan_json(plan))
    again = read_plan(tmp_path / "plan.json")
    assert again.state == state
    assert again.candidate().state == state
    check_program(again)


def test_three_million_tokens_fit_on_one_device_with_the_host_behind_it():
    """Where the tier is short it takes the inputs of all subsequences, and rather those than more.

    Planned by time alone, late subsequences fill it with what can be recomputed.
    """
    run = run_config(
        "llama-3.1-8b",
        length="3Mi",
        hardware={"preset": "h200", "devices_per_node": 1, "host_memory": "2TiB"},
        parallel={"schedule": "looped_bfs"},
    )
    large = machine(PRESETS["h200"], num_devices=1, host_memory_bytes=2 << 40)
    found = candidate_of_subsequences(
        run, hardware=large, degrees=Degrees(1, 1, 1), num_subsequences=512, virtual_stages=32
    )
    best = evaluate_candidate(replace(found, state=LADDER[3], kv="offloaded"))
    assert best.shortfall is None
    inputs = best.placement.retained[:, :, X_IN] + best.placement.offloaded[:, :, X_IN]
    assert (inputs == best.placement.tokens).all()
    assert best.placement.offloaded[0, :-1, X_IN].all()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_masters_are_in_the_tier_whatever_the_weights_are(dtype):
    one = candidate(HOST)
    one = replace(one, workload=replace(one.workload, dtype=dtype))
    behind = state_memory(one)[0]
    assert behind.host_optimizer_bytes == 12 * held(ON_DEVICE).device.weights_bytes // 2


def test_between_sequences_the_first_and_the_last_stage_meet():
    one = replace(candidate(LADDER[3]), sequences=2)
    two = state_memory(one)[0].device
    alone = held(LADDER[3]).device
    assert two.weights_bytes == alone.weights_bytes
    assert two.gradients_bytes == alone.gradients_bytes + 4 * 1000 * 64
