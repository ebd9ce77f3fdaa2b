"""Steps of several ranks that communicate by NCCL's rules: no order of messages may deadlock.

This also holds if all communicators of a rank share one stream, in the order in which the host
issues communication: NCCL requires it of ranks with several communicators.
"""

from unittest import mock

import pytest

from sppo.parallel.job.peer_errors import PeerLostError
from sppo.parallel.mesh import Mesh
from sppo.parallel.pipeline_p2p import PipelineLinks, _Awaited
from tests.engine import pipelined
from tests.engine.msp.test_msp import CUTS
from tests.engine.pipelined import Case, run_case
from tests.engine.test_pipeline import CUTS_FOR_TWO, SCHEDULES, check
from tests.nccl_rules import RulesGroup
from tests.tiers import default_of, exhaustive

LIMIT_S = 1.0
"""For what must not end."""


@pytest.mark.parametrize("schedule", default_of(SCHEDULES, "seq_zb_h1", "interleaved_seq1f1b"))
@pytest.mark.parametrize("num_ranks", [3, *exhaustive(2, 4)])
@pytest.mark.parametrize("rules", ["streams", "one stream"])
def test_every_schedule(ranks, schedule, num_ranks, rules):
    virtual = 2 if schedule.startswith("interleaved") else 1
    case = Case(
        shape=(1, num_ranks, 1),
        schedule=schedule,
        virtual=virtual,
        cuts=SCHEDULES[schedule],
        sizes={"num_layers": num_ranks * virtual},
        nccl_rules=rules,
    )
    check(ranks, case)


@pytest.mark.parametrize("sequence_parallel", ["ulysses", *exhaustive("megatron")])
@pytest.mark.parametrize("zero", [3, *exhaustive(1, 2)])
@pytest.mark.parametrize(
    "shape", [(1, 2, 2), *exhaustive((2, 2, 1), (2, 1, 2), (2, 2, 2))], ids=str
)
def test_every_axis(ranks, shape, zero, sequence_parallel):
    case = Case(
        "tied, yarn, all biases",
        shape=shape,
        sequence_parallel=sequence_parallel,
        schedule="seq_zb_h1" if zero == 1 else "sppo",
        cuts=((0, 3, 7, 11), (0, 6, 9)) if zero == 1 else CUTS_FOR_TWO,
        zero=zero,
        steps=2,
        nccl_rules="one stream",
    )
    check(ranks, case)


@pytest.mark.parametrize(
    "shape",
    [(1, 3, 1), *exhaustive((1, 2, 1), (1, 4, 1), (1, 3, 2), (2, 2, 2), (1, 8, 1))],
    ids=str,
)
@pytest.mark.parametrize("shards", default_of(CUTS, 4))
def test_shards_of_units(ranks, shape, shards):
    tokens_a_rank = 3 if shape[2] > 1 else 1  # or shards of 3 x 2 ranks would be empty
    cuts = [tuple(tokens_a_rank * cut for cut in CUTS[n]) for n in (shards, 4)]
    sizes = {"num_layers": max(4, shape[1]), "num_heads": 4, "num_kv_heads": 2, "head_size": 6}
    check(
        ranks,
        Case(
            shape=shape, schedule="sppo_msp", cuts=tuple(cuts), sizes=sizes, nccl_rules="one stream"
        ),
    )


def receives_first(rank, case, separate):
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
        return made if separate else {(a, b): made[min(a, b), max(a, b)] for a, b in made}

    pipelined._LINKS.clear()
    try:
        with (
            mock.patch.object(PipelineLinks, "send", send_later),
            mock.patch.object(PipelineLinks, "receive", receive_then_send),
            mock.patch.object(PipelineLinks, "wait_all", after_sending(wait_all)),
            mock.patch.object(_Awaited, "wait", after_sending(wait)),
            mock.patch.object(Mesh, "_make_edges", edges),
            mock.patch.object(RulesGroup, "longest_s", LIMIT_S if not separate else 30.0),
        ):
            run_case(rank, case)
    except PeerLostError as error:
        return str(error)
    finally:
        pipelined._LINKS.clear()
    return ""


@pytest.mark.parametrize(("rules", "separate"), [(None, False), ("streams", False)], ids=str)
def test_an_order_that_blocks_over_nccl_alone_is_found(ranks, rules, separate):
    """Both ends ask for a message before they send theirs: two directions, two communicators."""
    case = Case(shape=(1, 2, 1), schedule="seq1f1b", cuts=SCHEDULES["seq1f1b"], nccl_rules=rules)
    said = ranks.run(receives_first, case, separate, ranks=2)
    blocks = rules is not None and not separate
    assert [(f"timed out after {LIMIT_S:g} s" in text) for text in said] == [blocks] * 2, said
    assert blocks or said == ["", ""]
