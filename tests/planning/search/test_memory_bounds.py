"""Lower bounds of the memory that a candidate lacks."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.cost.candidate import Candidate
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.planning.search.memory_bounds import least_short_of_placement, least_shortfall
from tests.planning.some_candidates import SCHEDULES, candidates
from tests.tiers import examples

WHOLE_UNITS = tuple(schedule for schedule in SCHEDULES if schedule != "sppo_msp")
POLICIES = ("retain", "keep_attention", "recompute", "sppo", "offload_all", "hybrid")


def lacks_bytes(evaluated: EvaluatedCandidate) -> int:
    """Bytes that the fullest device lacks; below 0 if it has room."""
    return evaluated.device_peak_bytes - evaluated.candidate.budget_bytes


@settings(max_examples=examples(40, all=800), deadline=None)
@given(candidates(schedules=WHOLE_UNITS, policies=("auto",)), st.sampled_from(POLICIES))
def test_no_placement_lacks_less_than_its_bounds(candidate: Candidate, policy: str):
    found = evaluate_candidate(replace(candidate, policy=policy))
    bound = least_short_of_placement(found.candidate, found.placement)
    least = least_shortfall(found.candidate)
    assert least is None or least.short_bytes <= found.short_bytes
    assert bound <= found.short_bytes
    # The bound leaves out working set, heap, messages, and slots of copies.
    beside = max(
        rank.device.working_bytes
        + rank.device.heap_bytes
        + rank.device.communication_bytes
        + rank.device.copies_bytes
        for rank in found.memory
    )
    assert lacks_bytes(found) - beside <= bound + 1
