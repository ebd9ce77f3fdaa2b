"""Several pipelines in a step: the best there are, one program, no more memory than there is."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sppo.cost.memory.units_in_flight import UnitsInFlight
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
from tests.tiers import examples


def partitions(kinds):
    """All ways to part so many kinds into runs."""
    for count in range(kinds):
        for cuts in combinations(range(1, kinds), count):
            yield [range(begin, end) for begin, end in pairwise((0, *cuts, kinds))]


@settings(deadline=None, max_examples=examples(60, all=400))
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=5),
    st.integers(0, 2**32 - 1),
    st.floats(0, 0.6),
)
def test_no_other_partition_is_faster(alike, seed, refused):
    """Sequences of five kinds, some pipelines of which do not fit."""
    kinds = len(alike)
    counts = [kinds - kind for kind, number in enumerate(alike) for _ in range(number)]
    firsts = np.cumsum([0, *alike]).tolist()
    random = np.random.default_rng(seed)
    table = random.random((kinds + 1, kinds + 1))
    table[random.random(table.shape) < refused] = np.inf
    seconds = {
        range(firsts[begin], firsts[end]): table[begin, end]
        for begin, end in combinations(range(kinds + 1), 2)
    }

    def of_pipeline(own):
        return None if np.isinf(seconds[own]) else float(seconds[own])

    found = best_pipelines(counts, seconds=of_pipeline)
    totals = [sum(table[run.start, run.stop] for run in runs) for runs in partitions(kinds)]
    if found is None:
        assert np.isinf(min(totals))
        return
    assert sum(found) == len(counts)
    ends = np.cumsum([0, *found]).tolist()
    total = sum(seconds[range(begin, end)] for begin, end in pairwise(ends))
    assert total == pytest.approx(min(totals))


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
    monkeypatch.setattr(grouping, "best_pipelines", None)  # is not asked
    assert grouped(candidate, alone=alone) is None
