"""Requests that freeze weights: what fits, in which tiers, how fast, and what is advised."""

from __future__ import annotations

import warnings

import pytest

from sppo.cost.stages.saved_bytes import row_bytes_of
from sppo.cost.state_tiers import ON_DEVICE, StateTiers
from sppo.hardware.presets import PRESETS
from sppo.output_file import write_json
from sppo.planning.changes import what_would_fit
from sppo.planning.make_plan import make_plan
from sppo.planning.plan import check_program, plan_json, read_plan
from sppo.planning.search.solver import quick_best
from sppo.units import GIB
from tests.planning.cases import machine, run_config

H100 = PRESETS["h100"]
MODEL = {"preset": "llama-3.1-8b", "num_layers": 8}
ADAPTED = {"adapter": {"rank": 16}}
UPPER = {"train": {"only": ["layers.[67].*", "final_norm.*"]}}


def one_gpu(gib):
    """A node of one GPU with so many GiB, and much host memory."""
    return machine(
        H100, num_devices=1, memory_bytes=gib * GIB, reserved_bytes=0, host_memory_bytes=1 << 40
    )


def request(**sections):
    """Request of few choices, so that it is answered soon."""
    fixed = {"sequence": {"num_subsequences": 8}, "parallel": {"multiplexed": "off"}}
    return run_config(MODEL, length="64Ki", **fixed, **sections)


def best(gib, **sections):
    """Best candidate on one GPU with so many GiB."""
    return quick_best(request(**sections), one_gpu(gib))


def test_frozen_weights_leave_the_device_without_the_optimizer(tmp_path):
    """The weights take 5.2 GiB, and what trains 0.2 GiB."""
    found = best(7, **ADAPTED)
    assert found.candidate.state == StateTiers(weights="host")
    assert found.candidate.virtual_stages > 1
    (held,) = found.memory
    trained = found.candidate.workload.trainable.trained_shapes(found.candidate.workload.model)
    count = sum(a * b for a, b in trained.values())
    assert held.device.optimizer_bytes == pytest.approx(12 * count, rel=0.01)
    assert held.tier_gradients_bytes == held.host_optimizer_bytes == 0
    assert held.tier_weights_bytes > 5 * GIB > 2 * held.device.weights_bytes
    write_json(tmp_path / "plan.json", plan_json(make_plan(request(**ADAPTED), found)))
    again = read_plan(tmp_path / "plan.json")
    assert again.candidate() == found.candidate
    check_program(again)


def test_what_freezes_more_fits_in_less_and_is_faster():
    full, adapted, upper = (best(32, **sections) for sections in ({}, ADAPTED, UPPER))
    assert full.candidate.state == StateTiers(optimizer="host")
    assert adapted.candidate.state == upper.candidate.state == ON_DEVICE
    assert upper.step_s < adapted.step_s < full.step_s


def test_stages_without_backward_save_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        upper = best(10, **UPPER)
    stages, first = upper.candidate.stages, upper.candidate.forward_only_stages
    assert [len(layers) > 0 and layers.stop <= 6 for layers in stages].count(True) == first > 0
    assert not row_bytes_of(upper.candidate)[:first].any()


def test_adapters_are_advised_where_published_weights_do_not_fit():
    hardware = one_gpu(10)

    def advised(run):
        found = what_would_fit(run, machine_of=lambda _: hardware)
        return {change.change: change for change in found}

    random = request(state={"optimizer": "device"})
    assert "adapter.rank=16" not in advised(random)
    published = random.model_copy(
        update={"model": random.model.model_copy(update={"from_hf": "models/llama"})}
    )
    change = advised(published)["adapter.rank=16"]
    assert change.effect.startswith("10.5M of 2.8B parameters train, ")
    adapted = quick_best(request(state={"optimizer": "device"}, **ADAPTED), hardware)
    assert change.best.step_s == adapted.step_s
