"""Positions of messages in programs, and the proof that no queue can block."""

from __future__ import annotations

import pytest

from sppo.schedule.actions import ActionKind
from sppo.schedule.checks import check_deadlock_free, validate
from sppo.schedule.program_text import parse_program
from sppo.schedule.simulation.simulate import DeadlockError
from sppo.schedule.transfers.communication import place_messages
from tests.schedule.cases import make, play


def test_a_deadlock_names_where_the_ranks_stand():
    """Receives in front of the actions that need them block a queue that all messages share."""
    text = """
rank 0: 0F0.0 0SEND_ACT0.0 0F1.0 0SEND_ACT1.0 0RECV_GRAD0.0 0B0.0 0RECV_GRAD1.0 0B1.0
rank 1: 1RECV_ACT0.0 1F0.0 1B0.0 1SEND_GRAD0.0 1RECV_ACT1.0 1F1.0 1B1.0 1SEND_GRAD1.0
"""
    schedule = parse_program(text)
    validate(schedule)
    with pytest.raises(DeadlockError, match="one queue per rank: rank 0 at action 4, 0SEND_ACT1"):
        check_deadlock_free(schedule)


def test_compute_may_wait_for_everything_that_was_issued_before():
    """As on a GPU that loads a kernel's code: a shard must not stand behind its own message."""
    schedule = place_messages(make("sppo_msp", p=2, n=2, m=1))
    first, (shard, message, *rest) = schedule.programs
    assert (str(shard), str(message)) == ("0F0.0[1/2]", "1RECV_ACT0.0[0/2]")
    swapped = schedule.with_programs((first, (message, shard, *rest)))
    validate(swapped)
    with pytest.raises(DeadlockError, match=r"rank 0 at action 1, 0F0\.0\[0/2\]; rank 1"):
        check_deadlock_free(swapped)


def test_messages_change_neither_the_compute_nor_its_times():
    schedule = make("interleaved_seq1f1b", p=3, v=2, n=3, m=4)
    sent = place_messages(schedule)
    for before, after in zip(schedule.programs, sent.programs, strict=True):
        messages = (ActionKind.SEND, ActionKind.RECV)
        assert tuple(a for a in after if a.kind not in messages) == before
    assert play(sent, latency=0.3).makespan_s == play(schedule, latency=0.3).makespan_s


def test_shards_are_sent_interval_by_interval():
    """P=4, N=8: unit 0 in four shards on stage 0 and three on stage 1 makes six intervals."""
    sent = place_messages(make("sppo_msp", p=4, n=8, m=1, tokens=12))
    sends = sorted(
        str(a) for program in sent.programs for a in program if str(a).startswith("0SEND_ACT0.0")
    )
    # Shards of 3 3 3 3 against 4 4 4 tokens on ranks 1 2 3: cuts at 3 4 6 8 9. What stays on its
    # rank (intervals 1, 3 and 5) is not sent.
    assert sends == ["0SEND_ACT0.0[0/6]", "0SEND_ACT0.0[2/6]", "0SEND_ACT0.0[4/6]"]
