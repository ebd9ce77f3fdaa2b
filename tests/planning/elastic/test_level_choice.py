"""Levels of small steps fit, counted along the program, where each adds little time."""

from dataclasses import replace
from itertools import product

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from sppo.cost.packed_sequence import PackedSequence
from sppo.cost.stages.seconds import weight_operand_bytes
from sppo.planning.elastic.levels import level_choice
from sppo.planning.elastic.pacing import can_be_paced
from sppo.schedule.actions import ActionKind
from tests.planning.elastic.test_step_search import planner
from tests.planning.elastic.walked_memory import schedule_of, walked_peaks
from tests.schedule.pacing import forwards_between
from tests.tiers import examples

_LAYOUTS = [
    ("seq1f1b", 1, 1), ("seq1f1b", 2, 1), ("seq1f1b", 3, 1), ("seq_zb_h1", 2, 1), ("gpipe", 2, 1),
    ("looped_bfs", 1, 2), ("interleaved_seq1f1b", 2, 2),
]  # fmt: skip
"""Schedule, ranks, and stages of a rank."""
_MOST_UNITS = 6


@st.composite
def small_choices(draw, *, ordered=False):
    """Levels with random seconds and bytes of a few units, and room between least and most.

    If ordered, the last level needs least memory and adds most, as levels of a model do.
    """
    schedule, ranks, virtual = draw(st.sampled_from(_LAYOUTS))
    most = (_MOST_UNITS - ranks + 1) // virtual
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
    choice = level_choice(candidate, offloads=False)
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
    if ordered:
        for table in (choice.held_bytes, choice.forward_bytes, choice.backward_bytes):
            table[-1] = table.min(axis=0)
        choice.added[-1] = choice.added.max(axis=0)
    room = np.array([choice_peaks(choice, own) for own in all_alike(choice)]).max(axis=0)
    return choice, room * draw(st.floats(0.5, 1.1))


def all_alike(choice):
    """Levels [stages, units] with the same level of all units, of each level."""
    return [np.full(choice.added.shape[1:], level) for level in range(len(choice.placements))]


def diagonals_of(candidate):
    """The diagonal of each backward, [stages, units]: its place among its rank's, and the ranks
    behind."""
    firsts = [own.start for own in candidate.distinct_sequences]
    ranks = candidate.pipeline_parallel_degree
    found = {
        (action.stage, firsts[action.sequence] + action.subsequence): place + ranks - 1 - rank
        for rank, program in enumerate(schedule_of(candidate).programs)
        for place, action in enumerate(a for a in program if a.kind is ActionKind.B)
    }
    _, diagonals = zip(*sorted(found.items()), strict=True)
    return np.reshape(diagonals, (candidate.num_stages, -1))


def seconds_added(choice, levels, diagonals):
    """Seconds that units add in a pipeline: on each diagonal as many as the slowest."""
    slowest = np.zeros(diagonals.max() + 1)
    np.maximum.at(slowest, diagonals, chosen(choice.added, levels))
    return float(slowest.sum())


def has_room(choice, levels, room):
    return bool((choice.taken(levels).max(axis=1) <= room).all())


def least_added(choice, room, diagonals):
    """Fewest seconds that levels of units add that fit, of all there are."""
    every = product(range(len(choice.placements)), repeat=choice.added[0].size)
    levels = [np.reshape(one, choice.added.shape[1:]) for one in every]
    added = np.array([seconds_added(choice, own, diagonals) for own in levels])
    return next(added[i] for i in added.argsort() if has_room(choice, levels[i], room))


def chosen(tables, levels):
    """Entries [stages, units] of tables [levels, stages, units]."""
    return np.take_along_axis(tables, levels[None], axis=0)[0]


def choice_peaks(choice, levels):
    """Most bytes of each rank under levels of units, [stages, units]."""
    tables = (choice.forward_bytes, choice.backward_bytes)
    running = [chosen(table, levels) for table in tables]
    return np.array(walked_peaks(choice.candidate, chosen(choice.held_bytes, levels), running))


@settings(max_examples=examples(40, all=600))
@given(small_choices())
def test_levels_fit_and_are_the_cheapest_where_these_fit(given_choice):
    choice, room = given_choice
    found = choice.levels(room)
    if found is not None:
        assert (choice_peaks(choice, found) <= room * (1 + 1e-9)).all()
    cheapest = choice.added.argmin(axis=0)
    own = choice.taken(cheapest).max(axis=1) <= room
    for rank in np.flatnonzero(own) if found is not None else ():
        stages = slice(rank, None, len(room))
        assert (found[stages] == cheapest[stages]).all()


def test_levels_are_found_and_add_little_beside_the_best_there_are():
    """Over 300 choices, those of up to six units add 1.03 to 1.08 times as much as the best.

    They are found wherever the last levels, which need least memory, fit on all ranks.
    """
    sums = []

    @settings(
        max_examples=examples(100, all=300),
        derandomize=True,
        database=None,
        phases=[Phase.generate],
    )
    @given(small_choices(ordered=True))
    def compare(given_choice):
        choice, room = given_choice
        found = choice.levels(room)
        assert (found is not None) == has_room(choice, all_alike(choice)[-1], room)
        if found is not None and found.size <= _MOST_UNITS:
            diagonals = diagonals_of(choice.candidate)
            best = least_added(choice, room, diagonals)
            sums.append((seconds_added(choice, found, diagonals), best))

    compare()
    assert all(added >= best - 1e-9 for added, best in sums)
    added, best = np.sum(sums, axis=0)
    assert 0 < added <= 1.15 * best
