"""Bounds of time and memory, and predicted memory, hold for random candidates."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.cost.candidate import Candidate
from sppo.planning.search.bounds import least_seconds, least_shortfall
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.schedule.simulation.simulate import simulate
from tests.planning.some_candidates import ADAPTERS, SCHEDULES, candidates
from tests.tiers import examples

ROUNDING = 1e-9
WHOLE_UNITS = tuple(schedule for schedule in SCHEDULES if schedule != "sppo_msp")
POLICIES = ("retain", "keep_attention", "recompute", "sppo", "offload_all", "hybrid")
ONE_BUCKET_ONLY = ("gpipe", "1f1b", "sppo", "seq1f1b", "looped_bfs")
"""Schedules whose ranks reach the peaks of all buckets in the same moment if they retain all."""


@settings(max_examples=examples(60, all=400))
@given(candidates(schedules=SCHEDULES))
def test_a_simulation_takes_no_less_time_and_no_more_memory_than_is_said(candidate: Candidate):
    evaluated = evaluate_candidate(candidate)
    assert least_seconds(evaluated.candidate) <= evaluated.step_s * (1 + ROUNDING)
    for peak, stage in zip(evaluated.simulated_bytes, evaluated.memory, strict=True):
        assert peak <= stage.device.total_bytes + 8


@settings(max_examples=examples(30, all=400))
@given(candidates(adapters=ADAPTERS))
def test_a_simulation_with_adapters_takes_no_less_time_and_no_more_memory(candidate: Candidate):
    evaluated = evaluate_candidate(candidate)
    assert least_seconds(evaluated.candidate) <= evaluated.step_s * (1 + ROUNDING)
    for peak, stage in zip(evaluated.simulated_bytes, evaluated.memory, strict=True):
        assert peak <= stage.device.total_bytes + 8


@settings(max_examples=examples(40, all=800))
@given(candidates(schedules=WHOLE_UNITS, policies=("auto",)), st.sampled_from(POLICIES))
def test_no_placement_lacks_less_than_the_bound(candidate: Candidate, policy: str):
    found = evaluate_candidate(replace(candidate, policy=policy))
    least = least_shortfall(found.candidate)
    assert least is None or least.short_bytes <= found.short_bytes


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
