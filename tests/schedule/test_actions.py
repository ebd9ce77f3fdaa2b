from __future__ import annotations

from dataclasses import replace

import pytest

from sppo.schedule.actions import Action, ActionKind, Cut, Placement
from sppo.schedule.schedule import Schedule
from tests.schedule.cases import make


def test_text_form_of_every_kind():
    texts = [
        str(Action(ActionKind.F, 0, 2, 1)),
        str(Action(ActionKind.F, 0, 2, 1, shard=1, num_shards=3)),
        str(Action(ActionKind.SEND, 0, 2, 1, "act")),
        str(Action(ActionKind.RECV, 3, 2, 1, "grad", shard=0, num_shards=4)),
        str(Action(ActionKind.D2H, 0, 2, 1)),
        str(Action(ActionKind.REDUCE, 5)),
    ]
    assert texts == [
        "0F2.1",
        "0F2.1[1/3]",
        "0SEND_ACT2.1",
        "3RECV_GRAD2.1[0/4]",
        "0D2H2.1",
        "5REDUCE",
    ]


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
    others = [
        replace(schedule, name="other"),
        replace(schedule, lengths=((16, 16), (16, 15))),
        replace(schedule, placement=Placement(2, 2)),
        schedule.with_programs(schedule.programs[::-1]),
        replace(schedule, cuts=(Cut(0, 0, 0, (8, 8)),)),
    ]
    digests = {schedule.digest(), *(other.digest() for other in others)}
    assert len(digests) == len(others) + 1
    assert schedule.digest() == make("seq1f1b", p=2, n=2, m=2).digest()


def test_units_are_counted_through_all_sequences():
    schedule = Schedule.of_actions("s", Placement(2), ((10, 7),), ((), ()), (Cut(0, 0, 1, (5, 2)),))
    assert schedule.num_units == 2
    assert schedule.unit_offsets == (0,)
    assert not schedule.is_training
