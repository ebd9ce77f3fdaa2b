"""Degrees for a corpus: what is recommended fits, is fastest, and is the same every time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sppo.data.samples.length_distributions import draw
from sppo.hardware.run_hardware import run_hardware
from sppo.planning.corpus.search import DrawnSteps, plan_of_longest, solve_corpus
from sppo.planning.elastic.longest_samples import run_of_longest_samples
from sppo.planning.plan import check_plan_fits
from tests.make import make_run

LONGEST = 32768
MODEL = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "num_layers": 8,
    "num_heads": 8,
    "num_kv_heads": 8,
    "mlp_size": 4096,
}


def steps_of(*, samples=24, name="github", longest=LONGEST, count=2, seed=0):
    return DrawnSteps(
        name,
        "drawn",
        tuple(draw(name, samples, seed=seed + step, longest=longest) for step in range(count)),
    )


def run_of(*, devices=4, memory_gib=None, **sections):
    hardware = {"preset": "a100-40g", "nodes": 1, "devices_per_node": devices}
    usual = {"data": {"samples": "documents"}, "train": {"samples_per_step": 24}}
    run = make_run(MODEL, length=LONGEST, **{**usual, "hardware": hardware, **sections})
    machine = run_hardware(run)
    if memory_gib is None:
        return run, machine
    device = replace(machine.device, memory_bytes=int(memory_gib * 2**30), reserved_bytes=0)
    return run, replace(machine, device=device)


def solved(steps=None, **asked):
    run, machine = run_of(**asked)
    return solve_corpus(run, hardware=machine, steps=steps or steps_of())


@pytest.mark.parametrize(("devices", "memory_gib"), [(1, 12), (2, 12), (8, 12)])
def test_every_replica_fits_in_every_drawn_step(devices, memory_gib):
    found = solved(devices=devices, memory_gib=memory_gib)
    best = found.best
    assert best.degrees.num_devices <= devices
    assert len(best.plans) == 2
    assert best.longest.shortfall is None
    budget = best.planner.base.budget_bytes
    for lengths in found.steps.lengths:
        for replica in best.planner.divided(lengths):
            plan = best.planner.plan([lengths[index] for index in replica])
            assert plan.evaluated.device_peak_bytes <= budget
    assert best.planner.plan([LONGEST]).evaluated.shortfall is None
    assert all(plan.evaluated.device_peak_bytes <= budget for plan in best.plans)


def test_the_best_is_the_fastest_of_those_planned():
    found = solved(devices=8)
    seconds = [way.seconds for way in (found.best, *found.runners_up)]
    assert len(seconds) == 4
    assert seconds == sorted(seconds)
    assert len({way.degrees for way in (found.best, *found.runners_up)}) == 4
    assert found.num_planned >= 4
    # A closed form is near what is simulated, so it may choose what is simulated.
    assert found.best.closed_s == pytest.approx(found.best.seconds, rel=0.3)


def test_degrees_that_are_written_are_conditions():
    found = solved(devices=8, parallel={"pipeline_parallel_degree": 4})
    ways = [found.best, *found.runners_up]
    assert {way.degrees.pipeline_parallel for way in ways} == {4}


def test_replicas_have_a_sample_each():
    found = solved(steps_of(samples=3), devices=8, parallel={"sequence_parallel_degree": 1})
    ways = [found.best, *found.runners_up]
    assert max(way.degrees.data_parallel for way in ways) <= 3
    with_more = solved(steps_of(samples=3), devices=8, parallel={"data_parallel_degree": 4})
    assert with_more.best is None
    assert "a step may have only 3 samples" in with_more.rejected[0].reason


def test_a_longest_sample_that_fits_nowhere_is_told():
    found = solved(devices=2, memory_gib=0.25)
    assert found.best is None
    nearest = found.rejected[0]
    assert nearest.shortfall.short_bytes == min(
        refused.shortfall.short_bytes for refused in found.rejected if refused.shortfall
    )
    assert "the longest sample, of 32768 tokens, does not fit: stage" in nearest.reason
    assert "short by" in nearest.reason


def test_the_plan_rests_on_the_run_as_it_is_written():
    found = solved(devices=8)
    plan = plan_of_longest(found)
    check_plan_fits(plan, run_of_longest_samples(found.run))
    assert plan.boundaries[-1] == LONGEST
    assert (
        plan.data_parallel_degree,
        plan.pipeline_parallel_degree,
        plan.sequence_parallel_degree,
    ) == (
        found.best.degrees.data_parallel,
        found.best.degrees.pipeline_parallel,
        found.best.degrees.sequence_parallel,
    )
