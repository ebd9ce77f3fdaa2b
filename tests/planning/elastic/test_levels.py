"""Levels of steps whose activations cannot all be retained: they fit, and save time.

Memory is counted along the executed program (:mod:`tests.planning.elastic.walked_memory`).
"""

import re
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sppo.data.samples.length_distributions import draw
from sppo.planning.elastic import step_planner
from sppo.planning.elastic.levels import fastest_levels, level_choices
from sppo.planning.search.evaluation import evaluate_candidate
from tests.planning.cases import machine
from tests.planning.elastic.samples import lengths_of_samples
from tests.planning.elastic.test_step_plan import SCHEDULES, packed_candidates, planners
from tests.planning.elastic.test_step_search import LARGE, planner
from tests.planning.elastic.walked_memory import walked_device_bytes
from tests.tiers import examples


def on_machine(candidate, **change):
    """The candidate on its machine with some figures changed."""
    hardware = machine(candidate.workload.hardware, **change)
    return replace(candidate, workload=replace(candidate.workload, hardware=hardware))


def with_bytes(candidate, size):
    """The candidate on a device of so many bytes."""
    return on_machine(candidate, memory_bytes=size, reserved_bytes=0)


def place_levels(candidate, *, offloads=False, paces=False):
    """The candidate with levels, with its ranks paced where that may be and is necessary."""
    choice = next(level_choices(candidate, offloads=offloads))
    return choice.least_added() if paces or choice.candidate is candidate else None


def with_room(candidate, share):
    """The candidate on a device between what recomputing and what retaining everything takes."""
    least, most = (
        evaluate_candidate(replace(candidate, policy=policy)).device_peak_bytes
        for policy in ("recompute", "retain")
    )
    return with_bytes(candidate, round(least + share * (most - least)))


def pressed(samples=64, *, ranks=4, share=0.5, longest=65536, host=False):
    """A step of a large model in too little memory to retain everything."""
    planned = planner(longest, model=LARGE, hardware="a100-80g", ranks=ranks, sequence_parallel=8)
    base = planned.base if host else on_machine(planned.base, host_memory_bytes=0)
    lengths = draw("github", samples, seed=0, longest=longest)
    packed = replace(planned, base=base).packings(lengths)[0]
    return with_room(base.with_packed(packed.sequences), share)


@settings(max_examples=examples(15, all=300))
@given(
    packed_candidates(policies=("auto",), schedules=SCHEDULES),
    st.floats(-0.5, 1),
    st.sampled_from(["levels", "paced", "offloading"]),
)
def test_levels_never_break_a_limit(candidate, share, kind):
    candidate = with_room(candidate, share)
    found = place_levels(candidate, offloads=kind == "offloading", paces=kind == "paced")
    assume(found is not None)
    assert found.shortfall is None
    simulated = found
    assert max(simulated.simulated_bytes) <= candidate.budget_bytes
    assert max(walked_device_bytes(found)) <= candidate.budget_bytes + 8  # buckets are rounded
    rows = found.placement.retained + found.placement.offloaded + found.placement.recomputed
    assert (rows == found.placement.tokens[:, None]).all()


@st.composite
def pressed_steps(draw):
    """A planner whose devices have too little memory or just enough, and samples of a step."""
    planner = draw(planners(policies=("auto",)))
    lengths = draw(lengths_of_samples(longest=planner.longest))
    packed = planner.packings(lengths)[0]
    tight = with_room(planner.base.with_packed(packed.sequences), draw(st.floats(-0.2, 1.1)))
    base = replace(planner.base, workload=tight.workload)
    return replace(planner, base=base), lengths


@settings(max_examples=examples(6, all=300))
@given(pressed_steps())
def test_no_rank_holds_more_than_it_may_and_no_step_is_slower_than_without_levels(step):
    planner, lengths = step
    try:
        plan = planner.plan(lengths)
    except MemoryError:
        assume(False)
    budget = plan.evaluated.candidate.budget_bytes
    assert max(plan.evaluated.simulated_bytes) <= budget
    assert max(walked_device_bytes(plan.evaluated, plan.program)) <= budget + 8
    with mock.patch.object(step_planner, "fastest_levels", return_value=None):
        try:
            without = planner.plan(lengths)
        except MemoryError:
            return
    assert plan.step_s <= without.step_s


@settings(max_examples=examples(3, all=200))
@given(pressed_steps())
def test_what_does_not_fit_says_which_sample_which_stage_and_how_much(step):
    planner, lengths = step
    tight = with_bytes(planner.base, planner.base.budget_bytes // 3)
    planner = replace(planner, base=tight)
    try:
        planner.plan(lengths)
        assume(False)
    except MemoryError as error:
        text = str(error)
    sample, tokens = map(int, re.search(r"sample is (\d+), of (\d+) tokens", text).groups())
    assert lengths[sample] == tokens == max(lengths)
    found = re.search(r"stages? ([\d, ]+) (?:needs|of rank \d+ need) ", text)
    stages = [int(one) for one in found[1].split(", ")]
    assert set(stages) <= set(range(planner.base.num_stages))
    short = int(re.search(r"\((\d+) bytes short\)", text)[1])
    if "device memory" in text:
        # What is said to be missing is enough.
        assert replace(planner, base=with_bytes(tight, tight.budget_bytes + short)).plan(lengths)


@settings(max_examples=examples(6, all=200))
@given(packed_candidates(policies=("auto",), schedules=SCHEDULES), st.floats(1, 1.5))
def test_where_everything_can_be_retained_it_is(candidate, share):
    candidate = with_room(candidate, share)
    retaining = evaluate_candidate(replace(candidate, policy="retain"))
    assume(retaining.shortfall is None)
    found = fastest_levels(replace(candidate, kv=retaining.candidate.kv))
    assert found.step_s == pytest.approx(retaining.step_s)
    assert not found.placement.recomputed.any()
    assert not found.placement.offloaded.any()


@pytest.mark.parametrize("share", [0.1, 0.7])
def test_faster_than_the_policy_and_than_recomputing_all(share):
    candidate = pressed(share=share)
    policy, everything = (
        evaluate_candidate(replace(candidate, policy=policy)) for policy in ("hybrid", "recompute")
    )
    planned = fastest_levels(candidate)
    assert planned.step_s < min(policy.step_s, everything.step_s)


def test_what_hides_is_offloaded_where_there_is_a_tier():
    found = fastest_levels(pressed(share=0.6, host=True))
    assert found.placement.offloads_anything
    assert found.step_s <= fastest_levels(pressed(share=0.6)).step_s
