"""Levels of steps whose activations cannot all be retained: they fit, and save time."""

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sppo.activations.tensor_classes import ATTENTION, LINEAR
from sppo.data.samples.length_distributions import draw
from sppo.planning.elastic import step_plan
from sppo.planning.elastic.level_program import solve
from sppo.planning.elastic.levels import (
    LEVELS,
    OFFLOADING_LEVELS,
    _level_choice,
    checkpointing_levels,
    fastest_levels,
    place_levels,
)
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.planning.search.simulated_candidate import simulate_candidate, simulated_device_bytes
from sppo.schedule.checks.validate import validate
from tests.planning.elastic.test_step_plan import SCHEDULES, packed_candidates
from tests.planning.elastic.test_step_search import LARGE, planner
from tests.tiers import examples, exhaustive


def with_room(candidate, share):
    """The candidate on a device between what recomputing and what retaining everything takes."""
    least, most = (
        evaluate_candidate(replace(candidate, policy=policy)).device_peak_bytes
        for policy in ("recompute", "retain")
    )
    return with_bytes(candidate, round(least + share * (most - least)))


def with_bytes(candidate, size):
    """The candidate on a device of so many bytes."""
    workload = candidate.workload
    device = replace(workload.hardware.device, memory_bytes=size, reserved_bytes=0)
    hardware = replace(workload.hardware, device=device)
    return replace(candidate, workload=replace(workload, hardware=hardware))


def pressed(samples=64, *, ranks=4, share=0.5, longest=65536, host=False, seed=0):
    """A step of a large model in too little memory to retain everything."""
    planned = planner(longest, model=LARGE, hardware="a100-80g", ranks=ranks, sequence_parallel=8)
    node = planned.base.workload.hardware.node
    node = replace(node, host_memory_bytes=node.host_memory_bytes * host)
    hardware = replace(planned.base.workload.hardware, node=node)
    base = replace(planned.base, workload=replace(planned.base.workload, hardware=hardware))
    planned = planned.with_base(base)
    lengths = draw("github", samples, seed=seed, longest=longest)
    packed = planned.packing_search.packings(lengths)[0].packed
    return with_room(base.with_packed(packed.sequences), share)


@settings(
    deadline=None, max_examples=examples(12, all=300), suppress_health_check=[HealthCheck.too_slow]
)
@given(
    packed_candidates(policies=("auto",), schedules=SCHEDULES),
    st.floats(0, 1),
    st.sampled_from(["levels", "offloading", "checkpointing"]),
)
def test_levels_never_break_a_limit(candidate, share, kind):
    candidate = with_room(candidate, share)
    levels = LEVELS if kind == "levels" else OFFLOADING_LEVELS
    if kind == "checkpointing":
        levels = checkpointing_levels(4)
    found = place_levels(candidate, levels=levels, counts_shares=kind == "checkpointing")
    assume(found is not None)
    assert found.shortfall is None
    simulated = simulate_candidate(found)
    assert max(simulated_device_bytes(simulated)) <= candidate.budget_bytes
    rows = found.placement.retained + found.placement.offloaded + found.placement.recomputed
    assert (rows == found.placement.tokens[:, None]).all()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
def test_levels_of_a_step_add_little_more_than_the_best_there_are(share):
    """Of few units, every choice of levels is tried."""
    candidate = pressed(samples=6, ranks=2, share=share, longest=16384)
    choice = _level_choice(candidate, levels=LEVELS, counts_shares=False)
    least = np.full((candidate.num_stages, len(candidate.lengths)), len(LEVELS) - 1)
    room = choice.peak_bytes(np.zeros_like(least)) * (0.5 + 0.5 * share)
    program = choice.program(room)
    diagonals = len(program.cost)
    assert 3 < diagonals < 9
    every = (np.array(one) for one in product(range(len(LEVELS)), repeat=diagonals))
    best = min(program.added(one) for one in every if program.fits(one))
    found = solve(program)
    assert program.fits(found)
    everything = program.cost.max(axis=1).sum()
    assert best - 1e-9 <= program.added(found) <= best + 0.02 * everything


def test_everything_is_retained_where_it_fits():
    found = place_levels(pressed(share=1.001), levels=LEVELS)
    assert not found.placement.recomputed.any()


def test_nothing_is_found_where_nothing_fits():
    assert fastest_levels(pressed(share=-0.2)) is None


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_faster_than_recomputing_everything_and_than_the_policy(share):
    candidate = pressed(share=share)
    found = fastest_levels(candidate)
    policy, everything = (
        simulate_candidate(evaluate_candidate(replace(candidate, policy=policy)))
        for policy in ("hybrid", "recompute")
    )
    assert policy.shortfall is None
    assert found.step_s < policy.step_s
    assert found.step_s < 0.98 * everything.step_s
    assert found.device_peak_bytes <= candidate.budget_bytes


def test_the_paper_s_form_recomputes_layers_whole_and_as_few_as_may_be():
    candidate = pressed(share=0.5)
    found = place_levels(candidate, levels=checkpointing_levels(8), counts_shares=True)
    recomputed = found.placement.recomputed
    assert (recomputed[:, :, ATTENTION] == recomputed[:, :, LINEAR]).all()
    assert not (recomputed[recomputed < found.placement.tokens[None, :, None]] % 128).any()
    seconds = place_levels(candidate, levels=checkpointing_levels(8))
    assert simulate_candidate(seconds).step_s <= simulate_candidate(found).step_s * 1.02


def test_what_hides_is_offloaded_where_there_is_a_tier():
    candidate = pressed(share=0.6, host=True)
    found = fastest_levels(candidate)
    assert found.placement.offloads_anything
    without = replace(candidate, workload=pressed(share=0.6).workload)
    assert found.step_s <= fastest_levels(without).step_s


@pytest.mark.parametrize("host", [True, *exhaustive(False)])
def test_a_plan_with_levels_is_never_slower(monkeypatch, host):
    base = pressed(share=0.4, host=host)
    planned = planner(
        65536, model=LARGE, hardware="a100-80g", ranks=4, sequence_parallel=8
    ).with_base(base)
    lengths = draw("github", 64, seed=0, longest=65536)
    plan = planned.plan(lengths)
    validate(plan.program)
    assert planned.plan(lengths).digest == plan.digest
    monkeypatch.setattr(step_plan, "fastest_levels", lambda candidate: None)
    assert plan.step_s <= planned.plan(lengths).step_s


@pytest.mark.exhaustive
def test_what_does_not_fit_is_named():
    base = pressed(share=-0.3, ranks=2)
    planned = planner(
        65536, model=LARGE, hardware="a100-80g", ranks=2, sequence_parallel=8
    ).with_base(base)
    with pytest.raises(MemoryError, match=r"stage \d .* sample is 1, of 65536 tokens") as error:
        planned.plan([300, 65536])
    short = int(re.search(r"\((\d+) bytes\)", str(error.value)).group(1))
    roomier = with_bytes(base, base.budget_bytes + short)
    assert planned.with_base(roomier).plan([300, 65536])
