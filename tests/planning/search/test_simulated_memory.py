"""Predicted memory of a candidate is at least its simulated memory, for any combination."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.cost.candidate import Candidate
from sppo.cost.memory.units_in_flight import Running, UnitsInFlight
from sppo.planning.search.candidates import candidate_of_subsequences
from sppo.planning.search.choices import Degrees
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.planning.search.simulated_candidate import simulate_candidate, simulated_device_bytes
from sppo.schedule.actions import ActionKind
from sppo.schedule.generate import generate
from sppo.schedule.in_flight import sequences_in_flight
from sppo.schedule.orders.names import WHOLE_SEQUENCES
from sppo.schedule.simulation.simulate import simulate
from tests.planning.cases import machine, run_config
from tests.planning.some_candidates import candidates
from tests.tiers import examples

ONE_BUCKET_ONLY = ("gpipe", "1f1b", "sppo", "seq1f1b", "looped_bfs")
"""Schedules whose ranks reach the peaks of all buckets in the same moment if they retain all."""


@settings(deadline=None, max_examples=examples(20, all=60))
@given(candidates())
def test_a_simulation_never_holds_more_than_the_plan_says(candidate: Candidate):
    evaluated = simulate_candidate(evaluate_candidate(candidate))
    simulated = simulated_device_bytes(evaluated)
    assert simulated is not None
    for peak, stage in zip(simulated, evaluated.memory, strict=True):
        assert peak <= stage.device.total_bytes + 8


@settings(deadline=None, max_examples=examples(8, all=20))
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


def test_without_a_simulation_nothing_is_said():
    run = run_config("llama-3.2-1b", length=65536)
    candidate = candidate_of_subsequences(
        run, hardware=machine(), degrees=Degrees(1, 4, 2), num_subsequences=8
    )
    assert simulated_device_bytes(evaluate_candidate(candidate)) is None


# What is in flight, along columns and along the programs.


@settings(deadline=None, max_examples=examples(25, all=80))
@given(st.data())
def test_units_in_flight_are_those_of_the_program(data):
    several = ("looped_bfs", "interleaved_seq1f1b")
    overlapping = "sppo", "seq1f1b", "1f1b"
    schedule = data.draw(st.sampled_from([*overlapping, "seq_zb_h1", *several]))
    ranks, sequences = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    virtual = data.draw(st.integers(1, 4)) if schedule in several else 1
    count = 1 if schedule in WHOLE_SEQUENCES else data.draw(st.integers(1, 8))
    candidate = candidate_of_subsequences(
        run_config(
            "gpt-7b",
            length=4096,
            train={"sequences_per_step": sequences},
            parallel={"schedule": schedule},
        ),
        hardware=machine(),
        degrees=Degrees(1, ranks, 1),
        num_subsequences=count,
        virtual_stages=virtual,
    )
    seed = data.draw(st.integers(0, 2**32 - 1))
    weights, operands = np.random.default_rng(seed).random((2, ranks * virtual, count))
    units = UnitsInFlight(candidate)
    programs = generate(
        schedule,
        num_ranks=ranks,
        num_virtual=virtual,
        lengths=(candidate.lengths,) * sequences,
    ).programs
    most = _walked(programs, weights)
    assert units.peak(weights) == pytest.approx(most)
    counted = (units.counts(weights) * weights).sum(axis=1)
    assert counted.reshape(virtual, ranks).sum(axis=0) == pytest.approx(most)
    assert units.peak(weights, deferred=operands) == pytest.approx(
        _walked(programs, weights, operands)
    )
    forward, backward = np.random.default_rng(seed + 1).random((2, ranks * virtual, count))
    beside = units.peak(weights, deferred=operands, running=Running(forward, backward))
    assert beside == pytest.approx(
        _walked(programs, weights, operands, running=(forward, backward))
    )
    assert units.sequences.tolist() == [
        sequences_in_flight(a for a in programs[stage % ranks] if a.stage == stage)
        for stage in range(ranks * virtual)
    ]
    whole = np.random.default_rng(seed + 2).random(ranks * virtual)
    if virtual > 1:
        held = whole * sum(candidate.lengths)
        assert units.peak_of_kv(whole) == pytest.approx(_walked_sequences(programs, held))


def _walked_sequences(programs, weights):
    """Most that each program holds of whole sequences, from first F to last B on a stage."""
    peaks = []
    for program in programs:
        firsts, lasts = {}, {}
        for place, action in enumerate(program):
            if action.kind in (ActionKind.F, ActionKind.B):
                firsts.setdefault((action.stage, action.sequence), place)
                lasts[action.stage, action.sequence] = place
        peaks.append(
            max(
                sum(weights[s] for s, m in firsts if firsts[s, m] <= at <= lasts[s, m])
                for at in range(len(program))
            )
        )
    return peaks


def _walked(programs, weights, operands=None, *, running=None):
    """Most that is held along each program: weights from F to B, then operands to W."""
    peaks = []
    for program in programs:
        split = any(action.kind is ActionKind.W for action in program)
        kept = np.zeros_like(weights) if operands is None or not split else operands
        forward, backward = running or np.zeros((2, *weights.shape))
        held, peak = 0.0, 0.0
        for action in program:
            unit, before = (action.stage, action.subsequence), held
            if action.kind is ActionKind.F:
                held += weights[unit]
                peak = max(peak, held + forward[unit])
            elif action.kind is ActionKind.B:
                held += kept[unit] - weights[unit]
                peak = max(peak, max(before, held) + backward[unit])
            elif action.kind is ActionKind.W:
                held -= kept[unit]
        peaks.append(peak)
    return peaks
