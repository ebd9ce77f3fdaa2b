"""First stages without a backward, because nothing trains in them or below them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.schedule.abstract import AbstractCase, abstract_case, compared_case
from sppo.schedule.actions import UNITS_AHEAD, ActionKind, Op
from sppo.schedule.checks import check_deadlock_free, find_violations, validate
from sppo.schedule.costs import abstract_costs
from sppo.schedule.orders.names import WHOLE_SEQUENCES, WITH_VIRTUAL_STAGES, schedule_names
from sppo.schedule.program import generate, lower
from sppo.schedule.program_text import format_program, parse_program
from sppo.schedule.transfers.communication import place_messages
from sppo.schedule.transfers.copies import place_copies, place_state
from tests.schedule.cases import in_flight, make, peaks, play
from tests.schedule.pacing import forwards_between
from tests.tiers import examples

ragged = st.lists(
    st.lists(st.integers(6, 40), min_size=1, max_size=8).map(tuple), min_size=1, max_size=10
).map(tuple)


def most_waiting(schedule, *, stage):
    """Return the most inputs of a stage that have been received, or are about to be, unused."""
    waiting, most = 0, 0
    for action in schedule.programs[schedule.placement.rank_of(stage)]:
        if action.stage == stage and action.wire == "act":
            waiting += action.kind is ActionKind.RECV
        elif action.stage == stage and action.kind is ActionKind.F:
            waiting -= 1
        most = max(most, waiting)
    return most


@st.composite
def requests(draw):
    name = draw(st.sampled_from(schedule_names()))
    p, v, lengths = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(ragged)
    v = v if name in WITH_VIRTUAL_STAGES else 1
    lengths = [own[:1] for own in lengths] if name in WHOLE_SEQUENCES else lengths
    shape = {"num_ranks": p, "num_virtual": v, "lengths": lengths}
    if v == 1 and name not in ("looped_bfs", "sppo_msp") and draw(st.booleans()):
        share = draw(st.floats(0, 1))
        shape["forwards_before_backward"] = forwards_between(
            name, num_ranks=p, lengths=lengths, share=share
        )
    return name, shape, draw(st.integers(0, p * v - 1))


@settings(max_examples=examples(60, all=600))
@given(requests(), st.sampled_from((1.0, 0.2, 3.0)))
def test_any_request_keeps_its_forwards_and_no_queue_blocks(request, backward_s):
    name, shape, k = request
    whole = generate(name, **shape)
    schedule = generate(name, **shape, forward_only_stages=k)
    validate(schedule)
    assert schedule.forward_only_stages == k
    costs = abstract_costs(
        schedule.num_stages, num_units=schedule.num_units, backward_s=backward_s, weight_s=0.1
    )
    sent = place_messages(schedule, costs=costs)
    validate(sent)
    check_deadlock_free(sent)
    assert find_violations(sent) == []
    if name != "sppo_msp":  # which may cut other units
        kept = (whole.codes[whole.compute] == Op.F) | (whole.stages[whole.compute] >= k)
        expected = whole.columns[:, whole.compute[kept]]
        assert np.array_equal(schedule.columns[:, schedule.compute], expected)
    assert parse_program(format_program(sent)).programs == sent.programs
    assert {*schedule.slots[schedule.of(Op.REDUCE)].tolist()} == {*range(k, schedule.num_stages)}
    assert (sent.stages[sent.of(Op.B, Op.W, Op.RECV_GRAD)] >= k).all()
    assert (sent.stages[sent.of(Op.SEND_GRAD)] > k).all()


@settings(max_examples=examples(40, all=200))
@given(requests(), st.sampled_from((1.0, 10.0)))
def test_few_inputs_wait_for_the_next_rank(request, backward_s):
    """However much longer the stages behind take that have a backward."""
    name, shape, k = request
    name = "sppo" if name == "sppo_msp" else name
    shape |= {"num_virtual": 1}
    k %= shape["num_ranks"]
    costs = abstract_costs(
        shape["num_ranks"], num_units=sum(map(len, shape["lengths"])), backward_s=backward_s
    )
    schedule = lower(generate(name, **shape, forward_only_stages=k), costs=costs)
    for stage in range(1, k + 1):
        assert most_waiting(schedule, stage=stage) <= UNITS_AHEAD


@pytest.mark.parametrize("name", ["gpipe", "seq1f1b", "seq_zb_h1", "looped_bfs", "sppo_msp"])
def test_a_step_without_half_of_its_backwards_is_faster(name):
    """4 stages, 2 of them without a backward, take the time of the 2 others, and a fill."""
    whole, half = (
        make(name, p=4, n=4, m=6, **rest, tokens=8) for rest in ({}, {"forward_only_stages": 2})
    )
    bound = 6 * 4 * 3.0 + 2  # units of the third stage, after the fill
    if name != "sppo_msp":  # which runs shards of these units on the first ranks
        assert play(half).makespan_s >= bound
    if name in ("seq1f1b", "seq_zb_h1"):
        assert play(half).makespan_s <= bound + 3.0
    assert play(half).makespan_s < play(whole).makespan_s


def test_what_a_forward_only_stage_holds():
    """The unit that runs, and K and V of one sequence."""
    schedule = make("seq1f1b", p=4, n=4, m=3, forward_only_stages=2)
    timeline = play(schedule)
    assert in_flight(timeline)[:2] == [1, 1]
    assert in_flight(timeline)[2:] == in_flight(play(make("seq1f1b", p=4, n=4, m=3)))[2:]
    assert peaks(timeline, "activations")[:2] == [1, 1]


def test_nothing_of_a_forward_only_stage_is_copied_but_weights():
    schedule = make("looped_bfs", p=2, v=3, n=3, m=2, forward_only_stages=3)
    every = np.ones((6, 6), dtype=bool)
    copies = place_state(
        place_copies(schedule, offloaded=every, kv_offloaded=(0, 1, 2), kv_recomputed=(3,)),
        weights=True,
        gradients=True,
    )
    validate(copies)
    copied = copies.of(Op.D2H, Op.H2D, Op.D2H_KV, Op.H2D_KV, Op.KV, Op.D2H_GRADIENTS)
    assert {*copies.stages[copied].tolist()} == {3, 4, 5}
    assert {*copies.stages[copies.of(Op.H2D_WEIGHTS)].tolist()} == {*range(6)}


def test_a_stage_without_a_backward_moves_nothing_and_reduces_nothing():
    plain = "0F0.0 0F0.1 {}\n1F0.0 1F0.1 1B0.1 1B0.0"
    parse_program(plain.format(""))
    for wrong in ("0D2H0.0 0H2D0.0", "0KV0.0 0KV0.1", "0REDUCE", "0D2H_KV0.0 0H2D_KV0.0"):
        with pytest.raises(ValueError, match="not a valid schedule"):
            parse_program(plain.format(wrong))


@pytest.mark.parametrize("k", [-1, 4])
def test_the_last_stage_has_a_backward(k):
    with pytest.raises(ValueError, match=f"forward_only_stages {k}: must be at least 0 and less"):
        make("sppo", p=4, n=2, m=1, forward_only_stages=k)


def test_a_comparison_merges_the_stages_of_a_rank():
    """5 of 8 stages without a backward are 2 of 4, and the third one has a backward."""
    request = AbstractCase(
        schedule="looped_bfs",
        ranks=4,
        virtual=2,
        sequences=2,
        subsequences=4,
        forward_only_stages=5,
    )
    schedule, _ = abstract_case(request)
    merged, _ = compared_case(request, name="seq1f1b")
    assert [schedule.forward_only_stages, merged.forward_only_stages] == [5, 2]
