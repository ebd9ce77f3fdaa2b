"""Windows hold what is in flight, and a diagonal's units run at the same time."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.cost.memory.units_in_flight import UnitsInFlight
from sppo.planning.elastic.windows import rank_windows
from sppo.schedule.costs import abstract_costs
from sppo.schedule.generate import generate
from sppo.schedule.program import lower
from sppo.schedule.simulation.simulate import simulate
from tests.planning.elastic.test_step_plan import packed_candidates
from tests.tiers import examples


@settings(max_examples=examples(20, all=300))
@given(packed_candidates(policies=("retain",)), st.integers(0, 2**32 - 1))
def test_windows_hold_what_is_in_flight(candidate, seed):
    shape = candidate.num_stages, len(candidate.lengths)
    held = np.random.default_rng(seed).random(shape)
    windows = rank_windows(candidate)
    most = [(own.holds @ held[own.stages, own.units]).max() for own in windows]
    assert most == pytest.approx(UnitsInFlight(candidate).peak(held))
    for own in windows:
        units = set(zip(own.stages.tolist(), own.units.tolist(), strict=True))
        assert len(units) == len(own.units)
        assert {stage for stage, _ in units} == {*candidate.stages_of_rank(own.rank)}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("diagonal", [8, 11, 13])
def test_what_a_diagonal_adds_is_added_once(ranks, diagonal):
    """All ranks recompute for as long at the same time; one rank, and the others wait for it."""
    lengths, count = ((1,) * 8, (1,) * 8, (1,) * 8), 24

    def step_s(recomputed):
        costs = abstract_costs(ranks, num_units=count, backward_s=2.0, weight_s=0.0)
        backward_s = costs.backward_s.copy()
        for stage, unit in recomputed:
            backward_s[stage, unit] += 0.5
        costs = replace(costs, backward_s=backward_s)
        schedule = generate("seq1f1b", num_ranks=ranks, lengths=lengths)
        return simulate(lower(schedule, costs=costs), costs=costs).makespan_s

    backwards = [8 * sequence + unit for sequence in range(3) for unit in reversed(range(8))]
    on_diagonal = [(rank, backwards[diagonal - (ranks - 1 - rank)]) for rank in range(ranks)]
    before = step_s([])
    assert step_s(on_diagonal) - before == pytest.approx(0.5)
    elsewhere = [(rank, backwards[diagonal - rank]) for rank in range(ranks)]
    assert step_s(elsewhere) - before > 0.5
