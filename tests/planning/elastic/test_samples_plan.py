"""Number of stages on a rank in a run of samples: chosen for the steps of the run."""

import json
from dataclasses import replace
from functools import partial

import pytest

from sppo.data.samples.length_distributions import draw
from sppo.hardware.presets import PRESETS
from sppo.hardware.this_machine import divide_cpu
from sppo.planning.elastic.longest_samples import run_of_longest_samples
from sppo.planning.elastic.samples_plan import plan_samples
from sppo.planning.elastic.step_planner import StepPlanner, step_planner
from sppo.planning.plan import check_plan_fits, plan_json, read_plan
from sppo.planning.run_plan import plan_run
from tests.make import make_run

LONGEST = 8192
MODEL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_layers": 16,
    "num_heads": 2,
    "num_kv_heads": 2,
    "mlp_size": 512,
}
DEAR = 1.2e-8
"""Compute of a byte with which several stages pay in a step of the longest samples alone."""
STEPS = tuple(draw("magi", 192, seed=seed, longest=LONGEST, scale=1 / 24) for seed in range(2))


def run_of_samples(**parallel):
    return run_of_longest_samples(
        make_run(
            MODEL,
            length=LONGEST,
            data={"samples": "documents"},
            parallel={"pipeline_parallel_degree": 4, "multiplexed": "off", **parallel},
            train={"dtype": "fp32", "samples_per_step": 192},
        )
    )


def machine(per_byte):
    laptop = PRESETS["laptop-cpu"]
    network = replace(laptop.network, message_compute_s_per_byte=per_byte)
    return divide_cpu(replace(laptop, network=network), 4, threads=1, cores=4)


def seconds(plan):
    return sum(replace(step_planner(plan), quick=True).plan(lengths).step_s for lengths in STEPS)


@pytest.mark.parametrize("per_byte", [0.0, DEAR])
def test_the_steps_are_fastest_with_it(per_byte):
    run, room = run_of_samples(), {"hardware": machine(per_byte), "available_bytes": 4 << 30}
    plan = plan_samples(run, partial(plan_run, **room), steps=STEPS)
    single = plan_run(run_of_samples(virtual_stages=1), **room)
    of_longest = plan_run(run, **room)
    assert of_longest.virtual_stages > 1
    assert seconds(plan) == min(seconds(single), seconds(of_longest))


def test_dear_messages_leave_one_stage_on_a_rank(tmp_path):
    run = run_of_samples()
    room = {"hardware": machine(DEAR), "available_bytes": 4 << 30}
    plan = plan_samples(run, partial(plan_run, **room), steps=STEPS)
    assert plan.virtual_stages == 1 < plan_run(run, **room).virtual_stages
    check_plan_fits(plan, run)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_json(plan)))
    assert read_plan(path) == plan


def test_as_many_stages_as_were_asked_for():
    room = {"hardware": machine(DEAR), "available_bytes": 4 << 30}
    asked = run_of_samples(virtual_stages=4, schedule="looped_bfs")
    assert plan_samples(asked, partial(plan_run, **room), steps=STEPS).virtual_stages == 4


def test_what_fits_with_several_stages_alone_has_several():
    """Gradients of K and V of one stage at a time need less memory."""
    room = {"hardware": machine(DEAR)}
    run, single = run_of_samples(), run_of_samples(virtual_stages=1)
    needed = plan_run(run, available_bytes=4 << 30, **room).predicted.device_peak_bytes
    for available in range(needed // 4, needed, needed // 24):
        try:
            plan = plan_samples(
                run, partial(plan_run, available_bytes=available, **room), steps=STEPS
            )
        except MemoryError:
            continue
        with pytest.raises(MemoryError):
            plan_run(single, available_bytes=available, **room)
        assert plan.virtual_stages > 1
        return
    pytest.fail("no room in which several stages alone fit")


def test_a_plan_whose_steps_do_not_fit_is_not_taken(monkeypatch):
    """A step of the longest samples may fit, and a packed one not."""
    room = {"hardware": machine(0.0), "available_bytes": 4 << 30}
    run, planned = run_of_samples(), StepPlanner.plan
    assert plan_samples(run, partial(plan_run, **room), steps=STEPS).virtual_stages > 1

    def fits_on_one_stage(planner, lengths):
        if planner.base.virtual_stages > 1:
            raise MemoryError
        return planned(planner, lengths)

    monkeypatch.setattr(StepPlanner, "plan", fits_on_one_stage)
    assert plan_samples(run, partial(plan_run, **room), steps=STEPS).virtual_stages == 1


def test_a_plan_whose_keys_leave_the_device_fits_its_longest_sample_as_a_step():
    """In the looped order on one rank; the memory is what only that fits in."""
    run = make_run(
        "llama-3.2-1b",
        length=131072,
        data={"samples": "documents"},
        train={"samples_per_step": 8},
    )
    plan = plan_run(
        run_of_longest_samples(run),
        hardware=PRESETS["a100-80g"],
        available_bytes=28 << 30,
        host_bytes=64 << 30,
    )
    planner = step_planner(plan)
    assert planner.base.kv == "offloaded"
    step = planner.plan([131072])
    assert step.evaluated.shortfall is None
