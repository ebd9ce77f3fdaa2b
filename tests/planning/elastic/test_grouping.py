"""Several pipelines in a step: the best there are, one program, no more memory than there is."""

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sppo.cost.memory.units_in_flight import UnitsInFlight
from sppo.cost.packed_sequence import PackedSequence
from sppo.planning.candidate_program import candidate_program
from sppo.planning.elastic import grouping
from sppo.planning.elastic.grouping import best_pipelines, grouped
from sppo.planning.elastic.levels import fastest_levels
from sppo.planning.elastic.windows import rank_windows
from sppo.planning.search.evaluated_candidate import assess
from sppo.planning.search.simulated_candidate import simulate_candidate, simulated_device_bytes
from sppo.schedule.checks.validate import validate
from sppo.schedule.generators import generate
from sppo.schedule.simulation.simulate import simulate
from tests.planning.elastic.test_levels import pressed, with_room
from tests.planning.elastic.test_step_plan import SCHEDULES, packed_candidates, walked
from tests.planning.elastic.test_step_search import LARGE, planner
from tests.tiers import examples


def partitions(number):
    """All ways to part so many sequences into pipelines."""
    for count in range(number):
        for cuts in combinations(range(1, number), count):
            yield [range(begin, end) for begin, end in pairwise((0, *cuts, number))]


@settings(deadline=None, max_examples=examples(60, all=400))
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=7),
    st.integers(0, 2**32 - 1),
    st.floats(0, 0.3),
    st.floats(0, 1),
)
def test_no_other_partition_is_faster(counts, seed, refused, bound):
    """Some pipelines do not fit, nor longer ones; of all it is known what they take at least."""
    random, count = np.random.default_rng(seed), len(counts)
    table = random.random((count + 1, count + 1))
    bounds = table * bound
    for own in np.argwhere(random.random(table.shape) < refused).tolist():
        table[: own[0] + 1, own[1] :] = np.inf
    asked = []

    def of_pipeline(own):
        asked.append(own)
        seconds = table[own.start, own.stop]
        return None if np.isinf(seconds) else float(seconds)

    def least_s(own):
        return float(bounds[own.start, own.stop])

    found = best_pipelines(sorted(counts, reverse=True), seconds=of_pipeline, least_s=least_s)
    assert len(asked) == len({*asked})
    totals = [sum(table[run.start, run.stop] for run in runs) for runs in partitions(count)]
    if found is None:
        assert np.isinf(min(totals))
        return
    assert sum(found) == count
    ends = np.cumsum([0, *found]).tolist()
    assert sum(table[begin, end] for begin, end in pairwise(ends)) == pytest.approx(min(totals))


def test_no_more_pipelines_are_asked_for_than_may_be_the_best():
    counts, asked = [7, 6, 5, 4, 4, 4, 4, 1, 1, 1], []

    def seconds(own):
        asked.append(own)
        return 2.0 + sum(counts[own.start : own.stop])

    def least_s(own):
        return 1.0 + sum(counts[own.start : own.stop])

    assert best_pipelines(counts, seconds=seconds, least_s=least_s) == (10,)
    assert asked == [range(10)]


@st.composite
def small_steps(draw):
    """A step of few sequences with too little memory for one pipeline, or just enough."""
    planned = planner(
        65536,
        model=LARGE,
        hardware="a100-80g",
        ranks=draw(st.sampled_from([2, 4])),
        sequence_parallel=8,
    )
    node = replace(planned.base.workload.hardware.node, host_memory_bytes=0)
    hardware = replace(planned.base.workload.hardware, node=node)
    base = replace(planned.base, workload=replace(planned.base.workload, hardware=hardware))
    counts = sorted(draw(st.lists(st.integers(1, 6), min_size=2, max_size=4)), reverse=True)
    tokens = [draw(st.integers(16, 64)) * 128 for _ in counts]
    sequences = (
        PackedSequence((size * count,), (size,) * count)
        for count, size in zip(counts, tokens, strict=True)
    )
    return with_room(base.with_packed(tuple(sequences)), draw(st.floats(-0.1, 0.7)))


def fastest_s(candidate, pipelines):
    """Seconds of the fastest way to run these pipelines; no end where they do not fit."""
    found = fastest_levels(candidate.with_packed(candidate.packed, pipelines=pipelines))
    return np.inf if found is None else found.step_s


@settings(
    deadline=None, max_examples=examples(4, all=150), suppress_health_check=[HealthCheck.too_slow]
)
@given(small_steps())
def test_simulated_no_other_partition_is_faster(candidate):
    """Also none that parts sequences with the same number of subsequences.

    Pipelines that are planned one by one may fit where levels of all at once do not: every window
    is given room for the largest unit, which may be in another pipeline.
    """
    counts = [len(sequence.lengths) for sequence in candidate.packed]
    every = {
        tuple(map(len, runs)): fastest_s(candidate, tuple(map(len, runs)))
        for runs in partitions(len(counts))
    }
    alone = fastest_levels(candidate)
    several = grouped(candidate, alone=alone)
    found = min((one.step_s for one in (alone, several) if one is not None), default=np.inf)
    assert found <= 1.01 * min(every.values())


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 9])
def test_sequences_of_as_many_subsequences_hold_no_more_than_those_in_flight(ranks, count):
    """Of sequences of one subsequence as many as there are ranks, and not two."""
    base = planner(4096, ranks=ranks).base
    sequence = PackedSequence((512 * count,), (512,) * count)

    def peaks(number):
        units = UnitsInFlight(base.with_packed((sequence,) * number))
        return units.peak(np.ones((ranks, number * count))).tolist()

    in_flight = 1 + -(-(ranks - 1) // count)
    assert peaks(in_flight + 5) == peaks(in_flight)
    assert peaks(in_flight) == [count + ranks - 1 - rank for rank in range(ranks)]
    assert peaks(in_flight - 1)[0] < peaks(in_flight)[0]


@st.composite
def grouped_candidates(draw, **of_candidates):
    """A step in several pipelines."""
    candidate = draw(packed_candidates(**of_candidates))
    count = len(candidate.packed)
    ends = sorted({*draw(st.sets(st.integers(1, count), max_size=3)), count})
    pipelines = tuple(end - begin for begin, end in pairwise((0, *ends)))
    return candidate.with_packed(candidate.packed, pipelines=pipelines)


@settings(
    deadline=None, max_examples=examples(20, all=300), suppress_health_check=[HealthCheck.too_slow]
)
@given(grouped_candidates(policies=("retain",)), st.integers(0, 2**32 - 1))
def test_a_rank_ends_a_pipeline_before_it_begins_the_next(candidate, seed):
    schedule = generate(
        candidate.schedule,
        num_ranks=candidate.pipeline_parallel_degree,
        num_virtual=candidate.virtual_stages,
        lengths=candidate.sequence_lengths,
        pipelines=candidate.pipelines,
    )
    validate(schedule)
    for program in schedule.programs:
        of_actions = [
            next(n for n, own in enumerate(candidate.sequences_of_pipelines) if a.sequence in own)
            for a in program
            if a.sequence is not None
        ]
        assert of_actions == sorted(of_actions)
    held = np.random.default_rng(seed).random((candidate.num_stages, len(candidate.lengths)))
    peaks = UnitsInFlight(candidate).peak(held)
    assert peaks == pytest.approx(walked(schedule, held))
    windows = [own.holds @ held[own.stages, own.units] for own in rank_windows(candidate)]
    assert [most.max() for most in windows] == pytest.approx(peaks)


@settings(
    deadline=None, max_examples=examples(12, all=200), suppress_health_check=[HealthCheck.too_slow]
)
@given(grouped_candidates(policies=("auto", "recompute"), schedules=SCHEDULES), st.floats(0, 1))
def test_pipelines_never_break_a_limit(candidate, share):
    candidate = with_room(candidate, share)
    found = assess(candidate)
    assume(found.shortfall is None)
    simulated = simulate_candidate(found)
    assert max(simulated_device_bytes(simulated)) <= candidate.budget_bytes


def test_the_program_of_several_pipelines_is_the_simulated_one():
    candidate = pressed(share=0.3)
    candidate = candidate.with_packed(candidate.packed, pipelines=(1, len(candidate.packed) - 1))
    found = fastest_levels(candidate)
    program = candidate_program(found.candidate, costs=found.costs)
    assert simulate(program, costs=found.costs).makespan_s == pytest.approx(found.step_s)


def test_a_step_is_grouped_where_one_pipeline_does_not_fit():
    """Short sequences beside the longest one hold what it has no room for."""
    candidate = pressed(share=0.0, longest=131072)
    several = grouped(candidate, alone=None)
    assert several is not None
    assert len(several.candidate.pipelines) > 1
    assert several.shortfall is None


def test_a_step_is_not_grouped_where_little_is_recomputed(monkeypatch):
    candidate = pressed(share=0.97)
    alone = fastest_levels(candidate)
    monkeypatch.setattr(grouping, "fastest_levels", None)  # is not asked
    assert grouped(candidate, alone=alone) is None
