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


def test_actions_are_ordered_hashable_values():
    first, second = Action(ActionKind.B, 0, 0, 1), Action(ActionKind.F, 0, 0, 0)
    assert sorted([second, first]) == [first, second]
    assert {first: 1}[Action(ActionKind.B, 0, 0, 1)] == 1
    with pytest.raises(AttributeError):
        first.stage = 3


def test_unit_of_a_reduction_is_our_own_mistake():
    with pytest.raises(AssertionError, match="REDUCE of stage 5 names no sequence"):
        _ = Action(ActionKind.REDUCE, 5).unit


@pytest.mark.parametrize(
    ("style", "ranks"), [("loop", [0, 1, 2, 0, 1, 2]), ("v", [0, 1, 2, 2, 1, 0])]
)
def test_placement_styles(style, ranks):
    placement = Placement(3, 2, style)
    assert [placement.rank_of(stage) for stage in range(6)] == ranks
    assert placement.stages_of(0) == tuple(s for s in range(6) if ranks[s] == 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0,), "0 ranks with 1 stages"), ((2, 0), "must be at least 1"), ((2, 1, "x"), "'x'")],
)
def test_placement_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        Placement(*arguments)


def test_digest_sees_every_field():
    schedule = make("seq1f1b", p=2, n=2, m=2)
    others = [
        replace(schedule, name="other"),
        replace(schedule, lengths=((16, 16), (16, 15))),
        replace(schedule, placement=Placement(2, 1, "v")),
        replace(schedule, programs=schedule.programs[::-1]),
        replace(schedule, cuts=(Cut(0, 0, 0, (8, 8)),)),
    ]
    digests = {schedule.digest(), *(other.digest() for other in others)}
    assert len(digests) == len(others) + 1
    assert schedule.digest() == make("seq1f1b", p=2, n=2, m=2).digest()


def test_units_are_counted_through_all_sequences():
    schedule = Schedule("s", Placement(2), ((10, 7),), ((), ()), (Cut(0, 0, 1, (5, 2)),))
    assert schedule.num_units == 2
    assert schedule.unit_offsets == (0,)
    assert not schedule.is_training
