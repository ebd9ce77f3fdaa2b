"""Memory of a candidate beside what its simulation holds: never below it, whatever is combined."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.cost.candidate import Candidate
from sppo.cost.memory.units_in_flight import OVERLAPPING, Running, UnitsInFlight
from sppo.planning.candidate_program import candidate_program
from sppo.planning.search.candidates import candidate_of_subsequences
from sppo.planning.search.choices import Degrees
from sppo.planning.search.evaluated_candidate import assess
from sppo.planning.search.simulated_candidate import simulate_candidate, simulated_device_bytes
from sppo.schedule.actions import ActionKind
from sppo.schedule.generators import WHOLE_SEQUENCES, generate
from sppo.schedule.in_flight import sequences_in_flight
from sppo.schedule.simulate import simulate
from sppo.units import GIB
from tests.planning.cases import machine, run_config

SCHEDULES = ("sppo", "sppo_msp", "seq1f1b", "seq_zb_h1", "1f1b", "gpipe", "zb_h1")
ONE_BUCKET_ONLY = ("gpipe", "1f1b", "sppo", "seq1f1b")
"""Schedules whose ranks reach the peaks of all buckets in the same moment if they retain all."""


@st.composite
def candidates(draw, schedules=SCHEDULES, policies=("auto", "retain", "recompute", "sppo")):
    """A model cut, scheduled and sharded in some way, on a machine that may be too small."""
    schedule = draw(st.sampled_from(schedules))
    name, length = draw(
        st.sampled_from([("gpt-7b", 131072), ("llama-3.2-1b", 262144), ("llama-3.2-1b", 20000)])
    )
    pipeline, group = draw(st.sampled_from([(1, 8), (2, 4), (4, 2), (4, 8), (8, 1)]))
    hardware = machine(
        memory_bytes=int(draw(st.floats(6, 90)) * GIB),
        reserved_bytes=0,
        host_memory_bytes=draw(st.sampled_from([64, 2048])) * GIB,
        d2h_bytes_per_s=draw(st.floats(1e9, 4e10)),
        h2d_bytes_per_s=draw(st.floats(1e9, 4e10)),
        nodes=4,
    )
    run = run_config(
        name,
        length=length,
        train={"sequences_per_step": draw(st.integers(1, 5))},
        parallel={"schedule": schedule},
        activations={"policy": draw(st.sampled_from(policies))},
    )
    return candidate_of_subsequences(
        run,
        hardware=hardware,
        degrees=Degrees(1, pipeline, group),
        num_subsequences=1 if schedule in WHOLE_SEQUENCES else draw(st.integers(1, 17)),
    )


@settings(deadline=None, max_examples=60)
@given(candidates())
def test_a_simulation_never_holds_more_than_the_plan_says(candidate: Candidate):
    evaluated = simulate_candidate(assess(candidate))
    simulated = simulated_device_bytes(evaluated)
    assert simulated is not None
    for peak, stage in zip(simulated, evaluated.memory, strict=True):
        assert peak <= stage.device.total_bytes + 8


@settings(deadline=None, max_examples=20)
@given(candidates(schedules=ONE_BUCKET_ONLY, policies=("retain",)))
def test_what_retains_everything_holds_exactly_what_the_plan_says(candidate: Candidate):
    evaluated = assess(candidate)
    program = candidate_program(candidate, costs=evaluated.costs)
    timeline = simulate(program, costs=evaluated.costs)
    for track, stage in zip(timeline.ranks, evaluated.memory, strict=True):
        held = {name: track.memory[name].peak_bytes for name in ("activations", "kv")}
        assert held["activations"] == pytest.approx(stage.device.activations_bytes, abs=8)
        assert held["kv"] == pytest.approx(stage.device.kv_bytes, abs=8)


def test_without_a_simulation_nothing_is_said():
    run = run_config("llama-3.2-1b", length=65536)
    candidate = candidate_of_subsequences(
        run, hardware=machine(), degrees=Degrees(1, 4, 2), num_subsequences=8
    )
    assert simulated_device_bytes(assess(candidate)) is None


# What is in flight, in closed form and along the programs.


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_units_in_flight_are_those_of_the_program(data):
    schedule = data.draw(st.sampled_from([*OVERLAPPING[:1], *OVERLAPPING[2:], "seq_zb_h1"]))
    ranks, sequences = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
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
    )
    seed = data.draw(st.integers(0, 2**32 - 1))
    weights, operands = np.random.default_rng(seed).random((2, ranks, count))
    units = UnitsInFlight(candidate)
    programs = generate(
        schedule, num_ranks=ranks, lengths=(candidate.lengths,) * sequences
    ).programs
    most = _walked(programs, weights)
    assert units.peak(weights) == pytest.approx(most)
    assert (units.counts(weights) * weights).sum(axis=1) == pytest.approx(most)
    assert units.peak(weights, deferred=operands) == pytest.approx(
        _walked(programs, weights, operands)
    )
    forward, backward = np.random.default_rng(seed + 1).random((2, ranks, count))
    beside = units.peak(weights, deferred=operands, running=Running(forward, backward))
    walked = np.array(_walked(programs, weights, operands, running=(forward, backward)))
    assert (beside >= walked - 1e-9).all()
    # Several forwards ahead of the first backward count as the one that takes most.
    one_ahead = np.arange(ranks) >= ranks - 2
    exact = one_ahead | (schedule == "seq_zb_h1") | (sequences == 1)
    assert beside[exact] == pytest.approx(walked[exact])
    assert units.sequences.tolist() == [sequences_in_flight(program) for program in programs]


def _walked(programs, weights, operands=None, *, running=None):
    """Most that is held along each program: weights from F to B, then operands to W."""
    peaks = []
    for rank, program in enumerate(programs):
        split = any(action.kind is ActionKind.W for action in program)
        kept = np.zeros_like(weights[0]) if operands is None or not split else operands[rank]
        forward, backward = (table[rank] for table in running or np.zeros((2, *weights.shape)))
        held, peak = 0.0, 0.0
        for action in program:
            unit, before = action.subsequence, held
            if action.kind is ActionKind.F:
                held += weights[rank, unit]
                peak = max(peak, held + forward[unit])
            elif action.kind is ActionKind.B:
                held += kept[unit] - weights[rank, unit]
                peak = max(peak, max(before, held) + backward[unit])
            elif action.kind is ActionKind.W:
                held -= kept[unit]
        peaks.append(peak)
    return peaks
