"""Closed forms against simulations: bounds are bounds, and exact forms are exact."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from sppo.cost.candidate import Candidate
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.planning.search.simulated_candidate import simulate_candidate
from sppo.planning.search.step_prices import least_seconds
from tests.planning.some_candidates import SCHEDULES, candidates
from tests.tiers import examples

ROUNDING = 1e-9
WHOLE = tuple(name for name in SCHEDULES if name != "sppo_msp")
"""Schedules that run every unit whole on the rank of its stage."""


@settings(deadline=None, max_examples=examples(60, all=400))
@given(candidates(schedules=WHOLE))
def test_no_simulation_is_faster_than_its_bounds(candidate: Candidate):
    evaluated = simulate_candidate(evaluate_candidate(candidate))
    prices, step_s = evaluated.prices, evaluated.step_s * (1 + ROUNDING)
    assert least_seconds(evaluated.candidate, seconds=prices.seconds) <= step_s
    assert prices.least_s <= step_s
    if prices.is_exact:
        assert prices.time.step_s == pytest.approx(evaluated.step_s, rel=ROUNDING)
