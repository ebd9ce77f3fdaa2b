"""Steps of several ranks that communicate by NCCL's rules: no order of messages may deadlock.

This also holds if all communicators of a rank share one stream, in the order in which the host
issues communication: NCCL requires it of ranks with several communicators.
"""

from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import pytest

from sppo.engine.engine import Engine
from sppo.parallel.job.peer_errors import PeerLostError
from sppo.parallel.mesh import Mesh
from sppo.parallel.pipeline_p2p import PipelineLinks, _Awaited
from sppo.schedule.actions import COMPUTE_KINDS
from sppo.schedule.orders.names import WHOLE_SEQUENCES
from tests.nccl_rules import RulesGroup, await_issued, nccl_rules
from tests.random_training.oracle import first_state
from tests.random_training.pinned_cases import GQA, THREE, TIED, TWO, WHOLE, case
from tests.random_training.run_leg import run_leg
from tests.random_training.training import faults_of
from tests.ranks import RankPool
from tests.tiers import default_of, exhaustive

LIMIT_S = 1.0
"""For what must not end."""
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
class RuledRanks:
    """Processes that talk as over NCCL, a stream for each communicator or one for all."""

    ranks: RankPool
    streams: Literal["streams", "one stream"]

    def run(self, function: Any, *arguments: Any, ranks: int) -> list[Any]:
        return self.ranks.run(by_rules, self.streams, function, *arguments, ranks=ranks)


def by_rules(rank, streams, function, *arguments):
    """Launch as late as may be: compute waits for all that was issued before it on one stream."""
    accumulate = Engine.accumulate

    def late(index, action):
        if action.kind in COMPUTE_KINDS:
            await_issued()

    def accumulated_late(engine, *data, **options):
        return accumulate(engine, *data, **options, before_action=late)

    with (
        mock.patch.object(Engine, "accumulate", accumulated_late),
        nccl_rules(one_stream=streams == "one stream"),
    ):
        return function(rank, *arguments)


@pytest.mark.parametrize("schedule", default_of(SCHEDULES, "seq_zb_h1", "interleaved_seq1f1b"))
@pytest.mark.parametrize("num_ranks", [3, *exhaustive(2, 4)])
@pytest.mark.parametrize("streams", ["streams", "one stream"])
def test_every_schedule(ranks, schedule, num_ranks, streams):
    virtual = 2 if schedule.startswith("interleaved") else 1
    cuts = WHOLE if schedule in WHOLE_SEQUENCES else THREE
    layers = num_ranks * virtual
    one = case(GQA, layers, pp=num_ranks, virtual=virtual, schedule=schedule, **cuts)
    assert faults_of(one, RuledRanks(ranks, streams)) == []


@pytest.mark.parametrize("sequence_parallel", ["ulysses", *exhaustive("megatron")])
@pytest.mark.parametrize("zero", [3, *exhaustive(1, 2)])
@pytest.mark.parametrize(
    "shape", [(1, 2, 2), *exhaustive((2, 2, 1), (2, 1, 2), (2, 2, 2))], ids=str
)
def test_every_axis(ranks, shape, zero, sequence_parallel):
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
    assert faults_of(one, RuledRanks(ranks, "one stream")) == []


@pytest.mark.parametrize(
    "shape",
    [(1, 3, 1), *exhaustive((1, 2, 1), (1, 4, 1), (1, 3, 2), (2, 2, 2), (1, 8, 1))],
    ids=str,
)
@pytest.mark.parametrize(
    "cuts",
    [
        (0, 9, 14, 21, 30),
        *exhaustive((0, 9, 23), (0, 7, 12, 18, 22, 29, 34, 40, 45, 49)),
    ],
    ids=len,
)
def test_shards_of_units(ranks, shape, cuts):
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
        other_cuts=tuple(tokens_a_rank * cut for cut in (0, 9, 14, 21, 30)),
        replica_sequences=2,
    )
    assert faults_of(one, RuledRanks(ranks, "one stream")) == []


def receives_first(rank, one):
    """A step that asks for the next message before it sends one; which message it lacks."""
    send, receive, wait_all = PipelineLinks.send, PipelineLinks.receive, PipelineLinks.wait_all
    wait, make_edges = _Awaited.wait, Mesh._make_edges
    held = []

    def send_held():
        while held:
            links, tensor, options = held.pop(0)
            send(links, tensor, **options)

    def send_later(self, tensor, **options):
        send_held()
        held.append((self, tensor, options))

    def receive_then_send(self, shape, **options):
        asked = receive(self, shape, **options)
        send_held()
        return asked

    def after_sending(act):
        def acted(self):
            send_held()
            return act(self)

        return acted

    def edges(self, *, wraps):
        made = make_edges(self, wraps=wraps)
        return {(a, b): made[min(a, b), max(a, b)] for a, b in made}

    try:
        with (
            mock.patch.object(PipelineLinks, "send", send_later),
            mock.patch.object(PipelineLinks, "receive", receive_then_send),
            mock.patch.object(PipelineLinks, "wait_all", after_sending(wait_all)),
            mock.patch.object(_Awaited, "wait", after_sending(wait)),
            mock.patch.object(Mesh, "_make_edges", edges),
            mock.patch.object(RulesGroup, "longest_s", LIMIT_S),
        ):
            run_leg(rank, one, 0, first_state(one), "")
    except PeerLostError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("ruled", [False, True])
def test_an_order_that_blocks_over_nccl_alone_is_found(ranks, ruled):
    """Both ends ask for a message before they send theirs: two directions, two communicators."""
    one = case(GQA, 4, pp=2, schedule="seq1f1b", **THREE)
    pool = RuledRanks(ranks, "streams") if ruled else ranks
    said = pool.run(receives_first, one, ranks=2)
    assert [(f"timed out after {LIMIT_S:g} s" in text) for text in said] == [ruled] * 2, said
    assert ruled or said == ["", ""]
