"""Levels of small steps fit, counted along the program, where each adds little time."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.cost.packed_sequence import PackedSequence
from sppo.cost.stage_cost import weight_operand_bytes
from sppo.planning.elastic.levels import level_choice
from sppo.planning.elastic.pacing import can_be_paced
from tests.planning.elastic.test_step_search import planner
from tests.planning.elastic.walked_memory import walked_peaks
from tests.schedule.pacing import forwards_between
from tests.tiers import examples

_LAYOUTS = [
    ("seq1f1b", 1, 1), ("seq1f1b", 2, 1), ("seq1f1b", 3, 1), ("seq_zb_h1", 2, 1), ("gpipe", 2, 1),
    ("looped_bfs", 1, 2), ("interleaved_seq1f1b", 2, 2),
]  # fmt: skip
"""Schedule, ranks, and stages of a rank."""
_MOST_UNITS = 6


@st.composite
def small_choices(draw):
    """Levels with random seconds and bytes of a few units, and room between least and most."""
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
    levels = range(len(choice.placements))
    alike = [choice_peaks(choice, np.full(added.shape[1:], level)) for level in levels]
    room = np.array(alike).max(axis=0) * draw(st.floats(0.5, 1.1))
    return choice, room


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
