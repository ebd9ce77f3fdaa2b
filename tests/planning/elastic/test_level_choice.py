"""Levels of small steps fit, counted along the program, and add little time.

The expected cost of a choice is counted by other means: diagonals come from the backwards of the
generated program, memory from a walk along the program.
"""

from collections import defaultdict
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.cost.packed_sequence import PackedSequence
from sppo.cost.stage_cost import weight_operand_bytes
from sppo.planning.elastic.levels import LEVELS, level_choice
from sppo.planning.elastic.pacing import can_be_paced
from sppo.schedule.actions import ActionKind
from sppo.schedule.costs import abstract_costs
from sppo.schedule.program import generate, lower
from sppo.schedule.simulation.simulate import simulate
from tests.planning.elastic.test_step_search import planner
from tests.planning.elastic.walked_memory import schedule_of, walked_peaks
from tests.schedule.pacing import forwards_between
from tests.tiers import examples

_LAYOUTS = [
    ("seq1f1b", 1, 1), ("seq1f1b", 2, 1), ("seq1f1b", 3, 1), ("seq_zb_h1", 2, 1), ("gpipe", 2, 1),
    ("looped_bfs", 1, 2), ("interleaved_seq1f1b", 2, 2),
]  # fmt: skip
"""Schedule, ranks, and stages of a rank."""
_MOST_DIAGONALS = 6


@st.composite
def small_choices(draw):
    """Levels with random seconds and bytes of a few units, and room between least and most."""
    schedule, ranks, virtual = draw(st.sampled_from(_LAYOUTS))
    most = (_MOST_DIAGONALS - ranks + 1) // virtual
    cuts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=most))
    while sum(cuts) > most:
        cuts.pop()
    sequences = tuple(PackedSequence((300 * count,), (300,) * count) for count in cuts or [most])
    base = replace(planner(4096, ranks=ranks).base, schedule=schedule, virtual_stages=virtual)
    candidate = base.with_packed(sequences)
    if can_be_paced(candidate) and draw(st.booleans()):
        lengths = candidate.sequence_lengths
        counts = forwards_between(
            schedule, num_ranks=ranks, lengths=lengths, share=draw(st.sampled_from([0.0, 0.5]))
        )
        candidate = replace(candidate, forwards_before_backward=counts)
    count = draw(st.integers(2, 3))
    choice = level_choice(candidate, levels=LEVELS[:count])
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = float(choice.fixed_bytes[0].max())
    held, forward, backward, added = random.random((4, *choice.added.shape))
    choice = replace(
        choice,
        held_bytes=size * held,
        forward_bytes=size * forward * draw(st.sampled_from([0.2, 1, 4])),
        # A backward forms the operands that its weight half waits with.
        backward_bytes=size * backward + weight_operand_bytes(candidate),
        added=added * random.choice([0.0, 1.0], size=added.shape, p=[0.2, 0.8]),
    )
    levels = range(count)
    alike = [choice_peaks(choice, np.full(added.shape[1:], level)) for level in levels]
    room = np.array(alike).max(axis=0) * draw(st.floats(0.5, 1.1))
    return choice, room


def diagonals_of(schedule, candidate):
    """Which diagonal the backward of each (stage, unit) is on: its place among its rank's."""
    firsts = [own.start for own in candidate.distinct_sequences]
    ranks = candidate.pipeline_parallel_degree
    return {
        (action.stage, firsts[action.sequence] + action.subsequence): place + ranks - 1 - rank
        for rank, program in enumerate(schedule.programs)
        for place, action in enumerate(a for a in program if a.kind is ActionKind.B)
    }


def chosen(tables, levels):
    """Entries [stages, units] of tables [levels, stages, units]."""
    return np.take_along_axis(tables, levels[None], axis=0)[0]


def choice_peaks(choice, levels, schedule=None):
    """Most bytes of each rank under levels of units, [stages, units]."""
    tables = (choice.forward_bytes, choice.backward_bytes)
    running = [chosen(table, levels) for table in tables]
    return walked_peaks(choice.candidate, chosen(choice.held_bytes, levels), running, schedule)


def added_by(choice, diagonals, levels):
    """What levels of units add: on each diagonal as much as the slowest rank."""
    slowest = defaultdict(float)
    for (stage, unit), diagonal in diagonals.items():
        added = float(choice.added[levels[stage, unit], stage, unit])
        slowest[diagonal] = max(slowest[diagonal], added)
    return sum(slowest.values())


def of_units(choice, diagonals, of_diagonals):
    """Levels of units, [stages, units], from those of their diagonals."""
    levels = np.zeros(choice.added.shape[1:], dtype=np.intp)
    for at, diagonal in diagonals.items():
        levels[at] = of_diagonals[diagonal]
    return levels


def least_added(choice, room):
    """What the best choice adds of all that fit; None where none fits."""
    schedule = schedule_of(choice.candidate)
    diagonals = diagonals_of(schedule, choice.candidate)
    sums = []
    for one in product(range(len(choice.placements)), repeat=max(diagonals.values()) + 1):
        levels = of_units(choice, diagonals, one)
        if (np.array(choice_peaks(choice, levels, schedule)) <= room).all():
            sums.append(added_by(choice, diagonals, levels))
    return min(sums, default=None)


@settings(max_examples=examples(12, all=300))
@given(small_choices())
def test_levels_fit_and_add_at_least_as_much_as_the_best_of_all_choices(given_choice):
    choice, room = given_choice
    best, found = least_added(choice, room), choice.of_diagonals(room)
    if found is None:
        return
    levels = of_units(choice, diagonals_of(schedule_of(choice.candidate), choice.candidate), found)
    assert (np.array(choice_peaks(choice, levels)) <= room * (1 + 1e-9)).all()
    diagonals = diagonals_of(schedule_of(choice.candidate), choice.candidate)
    added = added_by(choice, diagonals, levels)
    assert added == pytest.approx(choice.added_by_diagonals[np.arange(len(found)), found].sum())
    assert best is not None
    assert added >= best - 1e-9


@settings(max_examples=examples(40, all=400))
@given(small_choices())
def test_units_are_lowered_only_where_there_is_room_and_nobody_waits(given_choice):
    choice, room = given_choice
    found = choice.of_diagonals(room)
    if found is None:
        return
    schedule = schedule_of(choice.candidate)
    diagonals = diagonals_of(schedule, choice.candidate)
    alike, lowered = of_units(choice, diagonals, found), choice.levels(room)
    assert (chosen(choice.added, lowered) <= chosen(choice.added, alike)).all()
    assert (np.array(choice_peaks(choice, lowered, schedule)) <= room * (1 + 1e-9)).all()
    assert added_by(choice, diagonals, lowered) <= added_by(choice, diagonals, alike)


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
