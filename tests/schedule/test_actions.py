from __future__ import annotations

import pytest

from sppo.schedule.actions import Cut, Placement
from sppo.schedule.schedule import Schedule
from tests.schedule.cases import make


def test_stages_go_round_the_ranks():
    placement = Placement(3, 2)
    assert [placement.rank_of(stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert placement.stages_of(1) == (1, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0,), "0 ranks with 1 stages"), ((2, 0), "must be at least 1")],
)
def test_placement_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        Placement(*arguments)


def test_digest_sees_every_field():
    schedule = make("seq1f1b", p=2, n=2, m=2)
    placement, lengths, columns = schedule.placement, schedule.lengths, schedule.columns
    others = [
        Schedule("other", placement, lengths, columns),
        Schedule("seq1f1b", placement, ((16, 16), (16, 15)), columns),
        Schedule("seq1f1b", Placement(2, 2), lengths, columns),
        schedule.with_programs(schedule.programs[::-1]),
        Schedule("seq1f1b", placement, lengths, columns, (Cut(0, 0, 0, (8, 8)),)),
    ]
    digests = {schedule.digest(), *(other.digest() for other in others)}
    assert len(digests) == len(others) + 1
    assert schedule.digest() == make("seq1f1b", p=2, n=2, m=2).digest()


def test_units_are_counted_through_all_sequences():
    schedule = Schedule.of_actions("s", Placement(2), ((10, 7),), ((), ()), (Cut(0, 0, 1, (5, 2)),))
    assert schedule.num_units == 2
    assert schedule.unit_offsets == (0,)
    assert not schedule.is_training
