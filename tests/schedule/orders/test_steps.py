"""Orders of work on one rank, where sequences have unequal numbers of subsequences."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sppo.schedule.orders import steps


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 8), st.integers(0, 12))
def test_groups_have_a_unit_for_every_rank_and_long_sequences_stay_alone(counts, ranks, short):
    lengths = tuple((1,) * count for count in counts)
    groups = steps.sequence_groups(lengths, num_ranks=ranks)
    assert [index for group in groups for index in group] == list(range(len(counts)))
    if sum(counts) >= ranks:
        assert all(sum(counts[index] for index in group) >= ranks for group in groups)
    long = ((1,) * ranks,) * 5
    groups = steps.sequence_groups((*long, *((1,),) * short), num_ranks=ranks)
    assert groups[:4] == [range(index, index + 1) for index in range(4)]
