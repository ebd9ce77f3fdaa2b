"""Invalid programs are refused; the error names the action and the rule."""

from __future__ import annotations

import numpy as np
import pytest

from sppo.schedule.actions import Cut
from sppo.schedule.checks import ScheduleError, find_violations, validate
from sppo.schedule.program_text import parse_action
from sppo.schedule.schedule import MalformedActionError, Schedule
from sppo.schedule.transfers.communication import place_messages
from sppo.schedule.transfers.copies import place_copies
from tests.schedule.cases import make


def edit(schedule: Schedule, rank: int, change) -> Schedule:
    """`schedule` with one program rewritten as text: change(list of words) -> list of words."""
    words = change([str(action) for action in schedule.programs[rank]])
    programs = list(schedule.programs)
    programs[rank] = tuple(parse_action(word) for word in words)
    return schedule.with_programs(programs)


def swap(one: str, other: str):
    def change(words):
        words = list(words)
        i, j = words.index(one), words.index(other)
        words[i], words[j] = words[j], words[i]
        return words

    return change


def without(*gone: str):
    return lambda words: [word for word in words if word not in gone]


def move(word: str, *, before: str):
    def change(words):
        rest = [w for w in words if w != word]
        rest.insert(rest.index(before), word)
        return rest

    return change


def add(word: str, *, before: str | None = None):
    def change(words):
        at = words.index(before) if before else len(words)
        return [*words[:at], word, *words[at:]]

    return change


SEQ = make("seq1f1b", p=2, n=2, m=2)
ZB = make("seq_zb_h1", p=2, n=2, m=2)
SENT = place_messages(SEQ)
COPIED = place_copies(SEQ, offloaded=np.array([[True, True, False, False]] * 2))
MSP = make("sppo_msp", p=2, n=4, m=1)
LOOPED = make("looped_bfs", p=1, v=2, n=2, m=1)
KEYS, AGAIN = place_copies(LOOPED, kv_offloaded=[0]), place_copies(LOOPED, kv_recomputed=[0])
MUST_FAIL = {
    "duplicate": (SEQ, 0, add("0F0.1", before="0B0.1"), "coverage", "0F0.1 is there more"),
    "missing": (SEQ, 1, without("1B1.0"), "coverage", "1B1.0 is missing"),
    "forward order": (SEQ, 0, swap("0F0.0", "0F0.1"), "forward order", "0F0.1 stands before 0F0.0"),
    "backward order": (SEQ, 1, swap("1B0.0", "1B0.1"), "backward order", "1B0.0 stands before"),
    "backward first": (SEQ, 1, move("1B0.1", before="1F0.1"), "backward order", "which it needs"),
    "wrong rank": (SEQ, 0, add("1W0.0"), "placement", "1W0.0 is on a rank without"),
    "weight order": (ZB, 0, move("0W0.1", before="0B0.1"), "weight order", "0W0.1 stands before"),
    "reduce early": (SEQ, 0, move("0REDUCE", before="0B1.0"), "reduction", "before 0B1.0"),
    "reduce twice": (SEQ, 0, add("0REDUCE"), "reduction", "0REDUCE is there more than once"),
    "reduce elsewhere": (SEQ, 0, add("1REDUCE"), "reduction", "does not hold its stage"),
    "copy early": (COPIED, 0, move("0D2H0.0", before="0F0.0"), "copy order", "0D2H0.0 stands"),
    "copy back late": (COPIED, 0, move("0H2D0.1", before="0REDUCE"), "copy order", "0B0.1 stands"),
    "copy back early": (COPIED, 0, move("0H2D0.0", before="0D2H0.0"), "copy order", "0H2D0.0"),
    "copy out only": (COPIED, 0, without("0H2D0.1"), "coverage", "0H2D0.1 is missing"),
    "copy back only": (COPIED, 0, without("0D2H0.1"), "coverage", "0D2H0.1 is missing"),
    "keys out only": (KEYS, 0, without("0H2D_KV0.1"), "coverage", "0H2D_KV0.1 is missing"),
    "keys of one unit": (KEYS, 0, without("0H2D_KV0.1", "0D2H_KV0.1"), "coverage", "is missing"),
    "keys late": (KEYS, 0, move("0H2D_KV0.1", before="0B0.0"), "copy order", "before 0H2D_KV0.1"),
    "not recomputed": (AGAIN, 0, without("0KV0.0"), "coverage", "0KV0.0 is missing"),
    "recomputed late": (AGAIN, 0, move("0KV0.0", before="0B0.0"), "copy order", "before 0KV0.0"),
    "copied and recomputed": (KEYS, 0, add("0KV0.0", before="1B0.1"), "placement", "move already"),
    "lost message": (SENT, 0, without("0SEND_ACT0.1"), "message coverage", "ACT0.1 is missing"),
    "lost receive": (SENT, 1, without("1RECV_ACT0.1"), "message coverage", "ACT0.1 is missing"),
    "twice sent": (SENT, 0, add("0SEND_ACT0.1"), "message coverage", "more than once"),
    "stray message": (SENT, 1, add("1SEND_ACT0.1"), "message coverage", "nothing that crosses"),
    "sent early": (SENT, 0, move("0SEND_ACT0.1", before="0F0.1"), "message place", "0SEND_ACT0.1"),
    "received late": (SENT, 1, move("1RECV_ACT0.0", before="1REDUCE"), "message place", "1F0.0"),
    "twice received": (SENT, 1, add("1RECV_ACT0.0", before="1F0.0"), "message coverage", "once"),
    "crossed": (SENT, 1, swap("1RECV_ACT0.1", "1RECV_ACT0.0"), "message order", "1RECV_ACT0.1"),
    "lost shard": (MSP, 1, without("0F0.0[1/2]"), "coverage", "1 of 2 shards"),
    "shard elsewhere": (MSP, 0, add("0B0.1[0/2]"), "placement", "0B0.1[0/2]"),
}  # fmt: skip


@pytest.mark.parametrize("case", MUST_FAIL)
def test_a_wrong_program_is_refused_with_its_action_and_rule(case):
    schedule, rank, change, rule, text = MUST_FAIL[case]
    validate(schedule)
    broken = edit(schedule, rank, change)
    violations = find_violations(broken)
    hits = [v for v in violations if v.rule == rule and text in v.text]
    assert hits, [str(v) for v in violations]
    assert all(v.rank in (0, 1) for v in hits)
    with pytest.raises(ScheduleError, match=f"rule: {violations[0].rule}"):
        validate(broken)


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        ("7F0.0", "rank 1, action 10, 7F0.0: stage 7 does not exist: there are 2"),
        ("0F9.0", "sequence 9 does not exist"),
        ("0F0.7", "has 2 subsequences"),
    ],
)
def test_an_action_of_nothing_is_refused_at_once(action, problem):
    with pytest.raises(MalformedActionError, match=problem):
        edit(SEQ, 1, add(action))


def test_receives_in_another_order_than_their_sends():
    schedule = place_messages(make("gpipe", p=2, n=2, m=2))
    words = [str(a) for a in schedule.programs[1]]
    early = sorted(words, key=lambda w: not w.startswith("1RECV_ACT"))
    crossed = edit(schedule, 1, lambda _: early)
    validate(crossed)
    swapped = edit(crossed, 1, swap("1RECV_ACT0.1", "1RECV_ACT1.0"))
    (violation,) = find_violations(swapped)
    assert violation.rule == "message order"
    assert "1RECV_ACT1.0 stands where rank 0 sends" in violation.text


def test_orders_that_wait_for_each_other():
    schedule = make("gpipe", p=2, n=1, m=2)
    late = edit(schedule, 0, lambda _: ["0F0.0", "0B0.0", "0F1.0", "0B1.0", "0REDUCE"])
    (violation,) = find_violations(late)
    assert violation.rule == "no deadlock"
    assert "rank 0 at action 2, 0B0.0" in violation.text
    assert (violation.rank, violation.index) == (0, 1)


def test_cuts_must_fit_their_units():
    wrong = Schedule("s", MSP.placement, MSP.lengths, MSP.columns, (Cut(0, 0, 0, (3, 3)),))
    (violation, *_) = find_violations(wrong)
    assert "must be positive and add up to 16 tokens" in violation.text
    short = Schedule("s", MSP.placement, ((16, 16, 16, 1),), MSP.columns)
    (violation, *_) = find_violations(short)
    assert "cut into [1, 0]" in violation.text


def test_the_error_shows_the_first_problems_and_counts_the_rest():
    schedule = make("seq1f1b", p=1, n=8, m=1)
    nothing = schedule.with_programs(((parse_action("0F0.0"),),))
    with pytest.raises(ScheduleError) as caught:
        validate(nothing)
    assert "rank 0, 0F0.1 is missing (rule: coverage)" in str(caught.value)
    assert "and 2 more" in str(caught.value)
    assert len(caught.value.violations) == 7


def test_one_program_per_rank():
    with pytest.raises(ValueError, match="1 programs for 2 ranks"):
        SEQ.with_programs(SEQ.programs[:1])
