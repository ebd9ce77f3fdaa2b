"""NCCL's rules in tests/nccl_rules.py find faults that gloo lets pass."""

from __future__ import annotations

import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from sppo.parallel.collectives import all_gather, reduce_scatter
from sppo.parallel.job.peer_errors import LATE, PeerLostError, peer_errors
from tests.nccl_rules import nccl_rules

LIMIT_S = 0.5
"""For what must not end."""


def group_of(ranks, *, rules, limit_s=None):
    with nccl_rules() if rules else nullcontext():
        group = dist.new_group(list(ranks), use_local_synchronization=True)
    if rules and limit_s is not None:
        group.limit_s = limit_s
    return group


def outcome(act):
    """What an act returns, or which error of torch ends it."""
    try:
        return act()
    except RuntimeError as error:
        return type(error).__name__, str(error)


def collectives(rank, count):
    group = group_of(range(count), rules=True)
    own = torch.arange(4.0) + 10 * rank
    total = own.clone()
    dist.all_reduce(total, group=group)
    at_1 = own.clone()
    dist.reduce(at_1, 1, group=group)
    from_1 = own.clone()
    dist.broadcast(from_1, 1, group=group)
    gathered = torch.empty(count * 4)
    all_gather(gathered, own, group=group)
    whole = torch.arange(float(count * 2)) * (rank + 1)
    rows = torch.empty(2)
    reduce_scatter(rows, whole, group=group)
    exchanged = torch.empty(count * 2)
    dist.all_to_all_single(exchanged, whole, group=group)
    dist.barrier(group=group)
    return [t.tolist() for t in (total, at_1, from_1, gathered, rows, exchanged)]


@pytest.mark.parametrize("count", [2, 3])
def test_collectives_do_what_they_are_to_do(ranks, count):
    own = [torch.arange(4.0) + 10 * rank for rank in range(count)]
    whole = [torch.arange(float(count * 2)) * (rank + 1) for rank in range(count)]
    for rank, found in enumerate(ranks.run(collectives, count, ranks=count)):
        total, at_1, from_1, gathered, rows, exchanged = found
        assert total == sum(own).tolist()
        assert rank != 1 or at_1 == sum(own).tolist()
        assert from_1 == own[1].tolist()
        assert gathered == torch.cat(own).tolist()
        assert rows == sum(whole)[2 * rank : 2 * rank + 2].tolist()
        assert exchanged == torch.cat([w[2 * rank : 2 * rank + 2] for w in whole]).tolist()


def post_receives_first(rank, rules):
    """Both ask for the other's message, send their own, and wait."""
    group = group_of([0, 1], rules=rules, limit_s=LIMIT_S)
    other, found = 1 - rank, torch.empty(3)

    def act():
        received = dist.irecv(found, other, group=group)
        sent = dist.isend(torch.full((3,), float(rank)), other, group=group)
        received.wait()
        sent.wait()
        return found.tolist()

    return outcome(act)


def test_both_directions_of_one_communicator(ranks):
    """Over NCCL a receive that was asked for first stands in front of the send."""
    assert ranks.run(post_receives_first, False, ranks=2) == [[1.0] * 3, [0.0] * 3]
    for rank, found in enumerate(ranks.run(post_receives_first, True, ranks=2)):
        assert found == ("RuntimeError", f"Timed out waiting 500ms for a receive from {1 - rank}")


def two_sends_in_turn(rank, rules, turned):
    """Rank 0 sends to 1 and to 2; they wait for each other in between. One order may block."""
    group = group_of([0, 1, 2], rules=rules, limit_s=LIMIT_S)
    side = group_of([1, 2] if rank else [0], rules=rules, limit_s=LIMIT_S)
    found = torch.empty(3)

    def act():
        if rank == 0:
            works = [
                dist.isend(torch.full((3,), float(to)), to, group=group)
                for to in ((2, 1) if turned else (1, 2))
            ]
            for work in works:
                work.wait()
            return []
        if rank == 1:
            dist.irecv(found, 0, group=group).wait()
            dist.isend(found, 2, group=side).wait()
        else:
            dist.irecv(found, 1, group=side).wait()
            dist.irecv(found, 0, group=group).wait()
        return found.tolist()

    return outcome(act)


@pytest.mark.parametrize("rules", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_two_sends_of_one_communicator_in_another_order(ranks, rules, turned):
    """Over gloo either order ends; over NCCL the second send waits behind the first."""
    found = ranks.run(two_sends_in_turn, rules, turned, ranks=3)
    if rules and turned:
        assert {name for name, _ in found} == {"RuntimeError"}
    else:
        assert found == [[], [1.0] * 3, [2.0] * 3]


def unwaited(rank):
    group = group_of([0, 1], rules=True)
    tensor = torch.full((2,), 1.0)
    if rank == 0:
        dist.isend(tensor, 1, group=group).wait()
        return []
    work = dist.irecv(tensor, 0, group=group)
    time.sleep(0.3)
    before = tensor.tolist()
    work.wait()
    return [before, tensor.tolist()]


def test_what_nobody_waits_for_is_not_there(ranks):
    _, (before, after) = ranks.run(unwaited, ranks=2)
    assert all(value != value for value in before)
    assert after == [1.0, 1.0]


def changed_on_its_way(rank):
    group = group_of([0, 1], rules=True)
    tensor = torch.zeros(2)
    if rank == 1:
        time.sleep(0.3)
        dist.irecv(tensor, 0, group=group).wait()
        return ""
    work = dist.isend(tensor, 1, group=group)
    tensor.add_(1)
    try:
        work.wait()
    except AssertionError as error:
        return str(error)
    return "nothing"


def test_a_message_that_changes_on_its_way_is_seen(ranks):
    assert ranks.run(changed_on_its_way, ranks=2) == [
        "a message was changed before it was sent",
        "",
    ]


def other_sizes(rank):
    group = group_of([0, 1], rules=True, limit_s=LIMIT_S)
    if rank == 0:
        try:
            dist.isend(torch.zeros(2), 1, group=group).wait()
        except AssertionError as error:
            return str(error)
    return outcome(lambda: dist.irecv(torch.zeros(4), 0, group=group).wait())[0]


def test_messages_of_different_sizes_do_not_meet(ranks):
    said = ranks.run(other_sizes, ranks=2)
    assert said == ["rank 1 receives 16 bytes, 8 are sent", "RuntimeError"]


def receive_from_the_dead(rank):
    group = group_of([0, 1], rules=True)
    dist.barrier(group=group)
    group.limit_s = LIMIT_S
    if rank == 1:
        group.die()
        return ""
    begin_s = time.monotonic()
    work = dist.irecv(torch.zeros(2), 1, group=group)
    with pytest.raises(PeerLostError) as caught, peer_errors("waiting for 0RECV_GRAD0"):
        work.wait()
    assert time.monotonic() - begin_s >= LIMIT_S, "somebody told that the other is gone"
    return str(caught.value)


def test_the_dead_do_not_answer(ranks):
    said = ranks.run(receive_from_the_dead, ranks=2)
    assert said == [f"waiting for 0RECV_GRAD0: timed out after 0.5 s{LATE}", ""]
