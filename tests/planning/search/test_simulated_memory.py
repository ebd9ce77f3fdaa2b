"""Predicted memory of a candidate is at least its simulated memory, for any combination."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from sppo.cost.candidate import Candidate
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.schedule.simulation.simulate import simulate
from tests.planning.some_candidates import candidates
from tests.tiers import examples

ONE_BUCKET_ONLY = ("gpipe", "1f1b", "sppo", "seq1f1b", "looped_bfs")
"""Schedules whose ranks reach the peaks of all buckets in the same moment if they retain all."""


@settings(max_examples=examples(20, all=60))
@given(candidates())
def test_a_simulation_never_holds_more_than_the_plan_says(candidate: Candidate):
    evaluated = evaluate_candidate(candidate)
    for peak, stage in zip(evaluated.simulated_bytes, evaluated.memory, strict=True):
        assert peak <= stage.device.total_bytes + 8


@settings(max_examples=examples(8, all=20))
@given(candidates(schedules=ONE_BUCKET_ONLY, policies=("retain",)))
def test_what_retains_everything_holds_exactly_what_the_plan_says(candidate: Candidate):
    evaluated = evaluate_candidate(candidate)
    program = candidate.program(evaluated.costs)
    timeline = simulate(program, costs=evaluated.costs)
    for track, stage in zip(timeline.ranks, evaluated.memory, strict=True):
        held = {name: track.memory[name].peak_bytes for name in ("activations", "kv")}
        assert held["activations"] == pytest.approx(stage.device.activations_bytes, abs=8)
        assert held["kv"] == pytest.approx(stage.device.kv_bytes, abs=8)
        gradients = track.memory["kv_gradients"].peak_bytes
        assert gradients == pytest.approx(stage.device.kv_gradients_bytes, abs=8)
