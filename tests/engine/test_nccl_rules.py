"""Steps of several ranks whose messages run in NCCL's order: none may wait for each other.

This also holds if all communicators of a rank share one stream, in the order in which the host
issues communication: NCCL requires it of ranks with several communicators.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from sppo.cost.trainable import Adapter, Trainable
from sppo.engine.engine import Engine
from sppo.parallel import pipeline_p2p
from sppo.schedule.actions import COMPUTE_KINDS
from sppo.schedule.orders.names import WHOLE_SEQUENCES
from tests.random_training.emulated_ranks import Order, run_emulated
from tests.random_training.pinned_cases import GQA, THREE, TIED, TWO, WHOLE, case
from tests.random_training.training import faults_of
from tests.random_training.turns import Deadlock
from tests.tiers import default_of, exhaustive

SCHEDULES = (
    "sppo",
    "seq1f1b",
    "seq_zb_h1",
    "interleaved_seq1f1b",
    "looped_bfs",
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "zb_h1",
)


@dataclass(frozen=True)
class OrderedRanks:
    """Emulated ranks whose operations run in an order.

    In one stream, compute waits for all that was issued before it, as late as a launch may be.
    """

    order: Order

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: int) -> list[Any]:
        accumulate = Engine.accumulate

        def late(index, action):
            if action.kind in COMPUTE_KINDS and self.order == "rank":
                pipeline_p2p.dist.wait_for_issued()

        def accumulated_late(engine, *data, **options):
            return accumulate(engine, *data, **options, before_action=late)

        with mock.patch.object(Engine, "accumulate", accumulated_late):
            return run_emulated(function, *arguments, ranks=ranks, seed=0, order=self.order)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_ranks", [3, *exhaustive(2, 4)])
@pytest.mark.parametrize("order", ["communicator", "rank"])
def test_every_schedule(schedule, num_ranks, order):
    virtual = 2 if schedule.startswith("interleaved") else 1
    cuts = WHOLE if schedule in WHOLE_SEQUENCES else THREE
    layers = num_ranks * virtual
    one = case(GQA, layers, pp=num_ranks, virtual=virtual, schedule=schedule, **cuts)
    assert faults_of(one, OrderedRanks(order)) == []


@pytest.mark.parametrize("sequence_parallel", ["ulysses", *exhaustive("megatron")])
@pytest.mark.parametrize("zero", [3, *exhaustive(1, 2)])
@pytest.mark.parametrize(
    "shape", [(1, 2, 2), *exhaustive((2, 2, 1), (2, 1, 2), (2, 2, 2))], ids=str
)
def test_every_axis(shape, zero, sequence_parallel):
    dp, pp, sp = shape
    one = case(
        TIED,
        4,
        dp=dp,
        pp=pp,
        sp=sp,
        sequence_parallel=sequence_parallel,
        schedule="seq_zb_h1" if zero == 1 else "sppo",
        zero=zero,
        steps=2,
        **TWO,
    )
    assert faults_of(one, OrderedRanks("rank")) == []


CUTS = (0, 9, 14, 21, 30)


@pytest.mark.parametrize("schedule", default_of([*SCHEDULES, "sppo_msp"], "seq1f1b", "looped_bfs"))
@pytest.mark.parametrize("below", [1, *exhaustive(2, 4)])
@pytest.mark.parametrize("order", ["rank", *exhaustive("communicator")])
def test_stages_without_a_backward(schedule, below, order):
    """Nothing trains in the first layers, of one for each stage."""
    virtual = 2 if schedule.startswith(("interleaved", "looped")) else 1
    layers = 3 * virtual
    trainable = Trainable(Adapter(2, 0.5, layers=(min(below, layers - 1),)), only=())
    cuts = WHOLE if schedule in WHOLE_SEQUENCES else {"cuts": CUTS, "other_cuts": CUTS}
    one = case(GQA, layers, pp=3, virtual=virtual, schedule=schedule, trainable=trainable, **cuts)
    assert faults_of(one, OrderedRanks(order)) == []


@pytest.mark.parametrize(
    "shape", default_of([(1, 3, 1), (1, 2, 1), (1, 3, 2), (2, 2, 2), (1, 8, 1)], (1, 3, 1)), ids=str
)
@pytest.mark.parametrize(
    "cuts", [CUTS, *exhaustive((0, 9, 23), (0, 7, 12, 18, 22, 29, 34, 40, 45, 49))], ids=len
)
def test_shards_of_units(shape, cuts):
    dp, pp, sp = shape
    tokens_a_rank = 3 if sp > 1 else 1  # or shards of 3 x 2 ranks would be empty
    one = case(
        GQA,
        max(4, pp),
        dp=dp,
        pp=pp,
        sp=sp,
        schedule="sppo_msp",
        cuts=tuple(tokens_a_rank * cut for cut in cuts),
        other_cuts=tuple(tokens_a_rank * cut for cut in CUTS),
        replica_sequences=2,
    )
    assert faults_of(one, OrderedRanks("rank")) == []


def receives_first(rank):
    """Both ask for the other's message, send their own, and wait."""
    dist = pipeline_p2p.dist
    group, found = dist.new_group([0, 1]), torch.zeros(1)
    received = dist.irecv(found, 1 - rank, group=group)
    sent = dist.isend(torch.full((1,), float(rank)), 1 - rank, group=group)
    received.wait()
    sent.wait()
    return float(found)


def sends_crosswise(rank):
    """Rank 0 sends to 2, then to 1; rank 2 waits for 1 first, and 1 for 0."""
    dist = pipeline_p2p.dist
    group, side, found = dist.new_group([0, 1, 2]), dist.new_group([1, 2]), torch.zeros(1)
    if rank == 0:
        works = [dist.isend(torch.ones(1), to, group=group) for to in (2, 1)]
        return [work.wait() for work in works]
    if rank == 1:
        dist.recv(found, 0, group=group)
        dist.send(found, 2, group=side)
    else:
        dist.recv(found, 1, group=side)
        dist.recv(found, 0, group=group)
    return float(found)


def sums_behind_a_message(rank):
    """One rank receives before it sums, the other sums before it sends: two communicators."""
    dist = pipeline_p2p.dist
    messages, sums, total = dist.new_group([0, 1]), dist.new_group([0, 1]), torch.ones(1)
    asked = dist.irecv(torch.zeros(1), 1, group=messages) if rank == 0 else None
    summed = dist.all_reduce(total, group=sums, async_op=True)
    asked = asked or dist.isend(torch.ones(1), 0, group=messages)
    summed.wait()
    asked.wait()
    return float(total)


@pytest.mark.parametrize(
    ("act", "ranks", "blocks_in"),
    [
        (receives_first, 2, ("communicator", "rank")),
        (sends_crosswise, 3, ("communicator", "rank")),
        (sums_behind_a_message, 2, ("rank",)),
    ],
)
@pytest.mark.parametrize("order", ["any", "communicator", "rank"])
def test_an_order_that_blocks_over_nccl_alone_is_found(act, ranks, blocks_in, order):
    if order not in blocks_in:
        assert len(run_emulated(act, ranks=ranks, seed=0, order=order)) == ranks
        return
    with pytest.raises(Deadlock):
        run_emulated(act, ranks=ranks, seed=0, order=order)
