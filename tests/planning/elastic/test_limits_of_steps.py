"""Plans of random steps: no rank exceeds its memory, none is slower than plans without levels.

Memory is counted along the executed program (:mod:`tests.planning.elastic.walked_memory`).
"""

import re
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sppo.planning.elastic import levels as levels_module
from sppo.planning.elastic import step_plan
from sppo.planning.elastic.levels import LEVELS, checkpointing_levels, fastest_levels, place_levels
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.planning.search.simulated_candidate import simulate_candidate, simulated_device_bytes
from tests.planning.elastic.samples import lengths_of_samples
from tests.planning.elastic.test_levels import pressed, with_bytes, with_room
from tests.planning.elastic.test_step_plan import SCHEDULES, packed_candidates, planners
from tests.planning.elastic.walked_memory import walked_device_bytes
from tests.tiers import examples


@st.composite
def pressed_steps(draw):
    """A planner whose devices have too little memory or just enough, and samples of a step."""
    planner = draw(planners(policies=("auto",)))
    lengths = draw(lengths_of_samples(longest=planner.longest))
    packed = planner.packing_search.packings(lengths)[0].packed
    tight = with_room(planner.base.with_packed(packed.sequences), draw(st.floats(-0.2, 1.1)))
    base = replace(planner.base, workload=tight.workload)
    return planner.with_base(base), lengths


@settings(
    deadline=None, max_examples=examples(20, all=300), suppress_health_check=[HealthCheck.too_slow]
)
@given(pressed_steps())
def test_no_rank_of_a_step_holds_more_than_it_may(step):
    planner, lengths = step
    try:
        plan = planner.plan(lengths)
    except MemoryError:
        assume(False)
    budget = plan.evaluated.candidate.budget_bytes
    simulated = simulated_device_bytes(plan.evaluated)
    assert simulated is not None
    assert max(simulated) <= budget
    walked = walked_device_bytes(plan.evaluated, plan.program)
    assert max(walked) <= budget + 8  # bytes of buckets are rounded


@settings(
    deadline=None, max_examples=examples(5, all=200), suppress_health_check=[HealthCheck.too_slow]
)
@given(pressed_steps())
def test_a_step_with_levels_is_never_slower_than_without(step):
    planner, lengths = step
    with mock.patch.object(step_plan, "fastest_levels", return_value=None):
        try:
            without = planner.plan(lengths)
        except MemoryError:
            assume(False)
    assert planner.plan(lengths).step_s <= without.step_s


@settings(
    deadline=None, max_examples=examples(12, all=200), suppress_health_check=[HealthCheck.too_slow]
)
@given(packed_candidates(policies=("auto",), schedules=SCHEDULES), st.floats(1, 1.5))
def test_where_everything_can_be_retained_it_is(candidate, share):
    candidate = with_room(candidate, share)
    retaining = evaluate_candidate(replace(candidate, policy="retain"))
    assume(retaining.shortfall is None)
    found = fastest_levels(replace(candidate, kv=retaining.candidate.kv))
    assert found.step_s == pytest.approx(simulate_candidate(retaining).step_s)
    assert not found.placement.recomputed.any()
    assert not found.placement.offloaded.any()


@settings(
    deadline=None, max_examples=examples(3, all=200), suppress_health_check=[HealthCheck.too_slow]
)
@given(pressed_steps())
def test_what_does_not_fit_says_which_sample_which_stage_and_how_much(step):
    planner, lengths = step
    tight = with_bytes(planner.base, planner.base.budget_bytes // 3)
    planner = planner.with_base(tight)
    try:
        planner.plan(lengths)
        assume(False)
    except MemoryError as error:
        text = str(error)
    sample, tokens = map(int, re.search(r"sample is (\d+), of (\d+) tokens", text).groups())
    assert lengths[sample] == tokens == max(lengths)
    stages = [int(one) for one in re.search(r"stages? ([\d, ]+) needs", text)[1].split(", ")]
    assert set(stages) <= set(range(planner.base.num_stages))
    short = int(re.search(r"\((\d+) bytes\)", text)[1])
    if "device memory" in text:
        # What is said to be missing is enough.
        assert planner.with_base(with_bytes(tight, tight.budget_bytes + short)).plan(lengths)


def test_a_search_without_a_result_recomputes_everything():
    """HiGHS may reach its limit of nodes before it finds any choice."""
    candidate = pressed(share=0.2)
    with mock.patch.object(levels_module, "solve", return_value=None):
        found = place_levels(candidate, levels=LEVELS)
    everything = evaluate_candidate(replace(candidate, policy="recompute"))
    assert found.shortfall is None
    assert (found.placement.recomputed == everything.placement.recomputed).all()


@pytest.mark.parametrize("share", [0.1, 0.4, 0.7])
def test_seconds_are_not_slower_than_the_paper_s_form_and_that_not_than_recomputing_all(share):
    """The paper counts layers recomputed; all of them is what its form comes to at the most."""
    candidate = pressed(share=share)
    layers = len(candidate.stages[0])
    paper = place_levels(candidate, levels=checkpointing_levels(layers), counts_shares=True)
    everything = simulate_candidate(evaluate_candidate(replace(candidate, policy="recompute")))
    planned = fastest_levels(candidate)
    paper_s = simulate_candidate(paper).step_s
    assert planned.step_s < paper_s < everything.step_s
    most = np.array(walked_device_bytes(paper)).max()
    assert most <= candidate.budget_bytes + 8
