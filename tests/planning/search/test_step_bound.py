"""The bound of the step time against simulations: it is one."""

from __future__ import annotations

from hypothesis import given, settings

from sppo.cost.candidate import Candidate
from sppo.planning.search.bounds import least_seconds
from sppo.planning.search.evaluation import evaluate_candidate
from tests.planning.some_candidates import SCHEDULES, candidates
from tests.tiers import examples

ROUNDING = 1e-9


@settings(max_examples=examples(60, all=400))
@given(candidates(schedules=SCHEDULES))
def test_no_simulation_is_faster_than_its_bound(candidate: Candidate):
    evaluated = evaluate_candidate(candidate)
    assert least_seconds(evaluated.candidate) <= evaluated.step_s * (1 + ROUNDING)
