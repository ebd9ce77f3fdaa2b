"""Simulated time: the documented cases, closed forms, and properties."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sppo.schedule.costs import Link, Links, abstract_costs
from sppo.schedule.simulation.simulate import simulate
from sppo.schedule.transfers.communication import place_messages
from tests.schedule.cases import SUBSEQUENCE_SCHEDULES, idle, in_flight, make, peaks, play
from tests.tiers import examples

ZB = {"f": 1, "b": 1, "w": 1}
TEN_CASES = {
    "1 gpipe": (("gpipe", 4, 1, 1, 8), {}, 33, [9] * 4, [8, 8, 8, 8]),
    "2 1f1b": (("1f1b", 4, 1, 1, 8), {}, 33, [9] * 4, [4, 3, 2, 1]),
    "3 1f1b, few sequences": (("1f1b", 4, 1, 1, 2), {}, 15, [9] * 4, [2, 2, 2, 1]),
    "4 seq1f1b": (("seq1f1b", 4, 1, 4, 4), {}, 57, [9] * 4, [7, 6, 5, 4]),
    "5 sppo, one sequence": (("sppo", 4, 1, 8, 1), {}, 33, [9] * 4, [8] * 4),
    "6 sppo, uneven": (("sppo", 3, 1, 3, 1), {"factors": (1, 2, 1)}, 24, [12] * 3, [3] * 3),
    "6 sppo, balanced": (("sppo", 3, 1, 3, 1), {"f": 4 / 3, "b": 8 / 3}, 20, [8] * 3, [3] * 3),
    "7 interleaved": (("interleaved_1f1b", 2, 2, 1, 4), {}, 27, [3] * 2, [5, 3]),
    "8 seq interleaved": (("interleaved_seq1f1b", 4, 2, 2, 4), {}, 57, [9] * 4, [12, 10, 8, 6]),
    "9 zb_h1": (("zb_h1", 4, 1, 1, 8), ZB, 27, [3] * 4, [4] * 4),
    "9 seq_zb_h1": (("seq_zb_h1", 4, 1, 4, 4), ZB, 51, [3] * 4, [7] * 4),
    "9 zb, one sequence": (("seq_zb_h1", 4, 1, 8, 1), ZB, 30, [6] * 4, [8] * 4),
    "10 latency": (("1f1b", 2, 1, 1, 4), {"latency": 1}, 19, [7] * 2, [2, 1]),
}


@pytest.mark.parametrize("case", TEN_CASES)
@pytest.mark.parametrize("with_messages", [False, True])
def test_the_ten_documented_cases(case, with_messages):
    (name, p, v, n, m), costs, makespan, idles, peak = TEN_CASES[case]
    schedule = make(name, p=p, v=v, n=n, m=m)
    timeline = play(place_messages(schedule) if with_messages else schedule, **costs)
    assert timeline.makespan_s == pytest.approx(makespan, rel=1e-12)
    assert idle(timeline) == pytest.approx(idles)
    assert in_flight(timeline) == peak
    assert timeline.bubble_fraction == pytest.approx(sum(idles) / (p * makespan))


durations = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@settings(max_examples=examples(30, all=80))
@given(st.integers(1, 6), durations, st.integers(0, 4))
def test_time_of_a_single_sequence(p, costs, extra):
    """T = sum(f + b) + (p - 1)(max f + max b): a proportionate flow shop."""
    schedule = make("sppo", p=p, n=len(costs), m=1)
    base = abstract_costs(p, num_units=len(costs), unit_factors=costs)
    backward = base.backward_s + extra
    timeline = simulate(schedule, costs=replace(base, backward_s=backward))
    f, b = costs, [2 * c + extra for c in costs]
    expected = sum(f) + sum(b) + (p - 1) * (max(f) + max(b))
    assert timeline.makespan_s == pytest.approx(expected)


@settings(max_examples=examples(30, all=60))
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 6), st.integers(1, 4))
def test_time_of_interleaving_when_the_groups_divide_the_sequences(p, v, n, groups):
    m = groups * -(-p // n)
    assume(m * n >= p)
    timeline = play(make("interleaved_seq1f1b", p=p, v=v, n=n, m=m))
    assert timeline.makespan_s == 3 * (m * n * v + p - 1)
    assert play(make("seq1f1b", p=p, n=n, m=m)).makespan_s == 3 * (m * n + p - 1)


@settings(max_examples=examples(30, all=60))
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.integers(1, 3))
def test_time_and_units_in_flight_of_the_looped_order(p, v, n, m):
    """Sequences of at least one subsequence for each rank follow one another."""
    assume(n >= p)
    timeline = play(make("looped_bfs", p=p, v=v, n=n, m=m))
    assert timeline.makespan_s == 3 * m * (v * n + p - 1)
    assert in_flight(timeline) == [v * n] * p


@settings(max_examples=examples(30, all=60))
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.sampled_from((1.0, 0.6, 1 / 3)))
def test_time_of_the_zero_bubble_schedule(p, n, m, weight):
    units = n * m
    timeline = play(make("seq_zb_h1", p=p, n=n, m=m), f=1, b=1, w=weight)
    if units >= p - 1 + n:
        assert timeline.makespan_s == pytest.approx((2 + weight) * units + (p - 1) * (2 - weight))
    elif weight == 1:
        assert timeline.makespan_s == 3 * units + (p - 1) + max(0, p - 1 + n - units)


@settings(max_examples=examples(30, all=80))
@given(
    st.sampled_from([name for name in SUBSEQUENCE_SCHEDULES if name != "sppo_msp"]),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 5),
    st.data(),
)
def test_time_is_bounded_below_and_grows_with_every_cost(name, p, m, n, data):
    schedule = make(name, p=p, v=2 if name.startswith("inter") else 1, n=n, m=m)
    shape = (schedule.num_stages, schedule.num_units)
    draw = st.lists(st.integers(0, 5), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1])
    base = abstract_costs(*shape[:1], num_units=shape[1])
    tables = {
        key: np.array(data.draw(draw), dtype=float).reshape(shape)
        for key in ("forward_s", "backward_s", "weight_s")
    }
    costs = replace(base, **tables)
    makespan = simulate(schedule, costs=costs).makespan_s
    work = sum(tables.values()).sum(axis=1)
    per_rank = [work[list(schedule.placement.stages_of(rank))].sum() for rank in range(p)]
    assert makespan >= max(per_rank) - 1e-9
    key = data.draw(st.sampled_from(sorted(tables)))
    stage, unit = data.draw(st.integers(0, shape[0] - 1)), data.draw(st.integers(0, shape[1] - 1))
    longer = tables[key].copy()
    longer[stage, unit] += 1
    assert simulate(schedule, costs=replace(costs, **{key: longer})).makespan_s >= makespan - 1e-9
    assert play(schedule, latency=1).makespan_s >= play(schedule).makespan_s


@settings(max_examples=examples(30, all=60))
@given(
    st.sampled_from(SUBSEQUENCE_SCHEDULES),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 5),
    st.floats(0.1, 3),
    st.floats(0.1, 3),
)
def test_busy_and_idle_add_up_and_units_of_memory_are_units_in_flight(name, p, m, n, f, b):
    """Whatever the durations: rounding must not let a release slip behind an allocation."""
    timeline = play(make(name, p=p, n=n, m=m), latency=0.25, f=f, b=b, w=f)
    assert peaks(timeline) == pytest.approx(in_flight(timeline))
    assert timeline.idle_s.sum(axis=1).tolist() == pytest.approx(idle(timeline))
    for rank, track in enumerate(timeline.ranks):
        busy = sum(s.finish_s - s.start_s for s in timeline.spans(rank) if s.lane == "compute")
        assert busy + track.idle_s() == pytest.approx(timeline.makespan_s)
        assert all(i.start_s < i.finish_s for i in track.idle)


def test_waiting_for_a_message_is_told_from_waiting_for_its_sender():
    timeline = play(make("sppo", p=2, n=1, m=1), latency=0.5)
    first, second = timeline.ranks
    assert [(i.start_s, i.finish_s, i.cause) for i in second.idle] == [
        (0, 1, "bubble"),
        (1, 1.5, "communication"),
        (4.5, 7, "bubble"),
    ]
    assert first.idle_s("communication") == 0.5
    assert first.idle_s("bubble") == 3.5


def test_a_slow_link_passes_one_message_at_a_time_and_slows_no_other_link():
    schedule = make("sppo", p=3, n=3, m=1, forward_only=True)
    links = Links(between={(1, 2): Link(bytes_per_s=0.5)})
    costs = replace(abstract_costs(3, num_units=3, links=links), message_bytes=np.ones(3))
    starts = [track.start_s.tolist() for track in simulate(schedule, costs=costs).ranks]
    assert starts == [[0, 1, 2], [1, 2, 3], [4, 6, 8]]


def test_evaluation_keeps_activations_of_one_unit_only():
    timeline = play(make("sppo", p=2, n=4, m=1, forward_only=True))
    assert in_flight(timeline) == [1, 1]
    assert peaks(timeline) == [1, 1]


def test_key_value_gradients_live_for_a_whole_sequences_backward():
    schedule = make("sppo", p=1, n=3, m=1)
    costs = abstract_costs(1, num_units=3)
    costs = replace(costs, kv_bytes=np.ones((1, 3)), kv_gradient_bytes=np.full((1, 3), 2.0))
    track = simulate(schedule, costs=costs).ranks[0]
    assert track.memory["kv"].peak_bytes == 3
    assert track.memory["kv_gradients"].peak_bytes == 6
    assert track.memory["total"].peak_bytes == 3 + 3 + 6
    assert track.memory["total"].values_bytes[-1] == 0


def test_a_reduction_lengthens_the_step_but_not_the_compute():
    schedule = make("sppo", p=1, n=1, m=1)
    costs = replace(abstract_costs(1, num_units=1), reduce_s=np.array([4.0]))
    timeline = simulate(schedule, costs=costs)
    assert timeline.makespan_s == 7
    assert idle(timeline) == [4]


def test_compute_waits_for_a_reduction_between_two_stages_of_a_rank():
    schedule = make("looped_bfs", p=1, v=2, n=3, m=1)
    costs = replace(abstract_costs(2, num_units=3), reduce_s=np.array([4.0, 0.5]))
    timeline = simulate(schedule, costs=costs)
    assert timeline.makespan_s == 2 * 3 * 3 + 4.5
    assert timeline.ranks[0].idle_s("communication") == 0.5
    assert timeline.ranks[0].idle_s() == 4.5
