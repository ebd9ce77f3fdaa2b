"""Lower bound of the memory that a candidate lacks."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.cost.candidate import Candidate
from sppo.planning.search.bounds import least_shortfall
from sppo.planning.search.evaluation import evaluate_candidate
from tests.planning.some_candidates import SCHEDULES, candidates
from tests.tiers import examples

WHOLE_UNITS = tuple(schedule for schedule in SCHEDULES if schedule != "sppo_msp")
POLICIES = ("retain", "keep_attention", "recompute", "sppo", "offload_all", "hybrid")


@settings(max_examples=examples(40, all=800))
@given(candidates(schedules=WHOLE_UNITS, policies=("auto",)), st.sampled_from(POLICIES))
def test_no_placement_lacks_less_than_the_bound(candidate: Candidate, policy: str):
    found = evaluate_candidate(replace(candidate, policy=policy))
    least = least_shortfall(found.candidate)
    assert least is None or least.short_bytes <= found.short_bytes
