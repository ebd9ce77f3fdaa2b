"""Closed form of the step time against the simulator and the paper's formula."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.cost.step_time import step_time
from sppo.schedule.costs import CopyEngines, Link, Links, abstract_costs
from sppo.schedule.orders.rank_orders import sequence_groups
from tests.planning.cases import play
from tests.tiers import examples

GAP = 1.25
"""Several sequences take at most this much longer than their bound says, however unequal units are;
pipelines of a real model stay below 1.02."""

shapes = st.tuples(st.integers(1, 5), st.integers(1, 9))
seeds = st.integers(0, 2**32 - 1)
links = st.builds(
    lambda latency, rate: Links(Link(latency, rate)),
    st.sampled_from([0.0, 0.1, 3.0]),
    st.sampled_from([0.3, 2.0, float("inf")]),
)


def random_costs(shape, *, seed, sequences=1, wires=None, spread=1.0):
    """Any times for every stage and unit, the same for every sequence."""
    random = np.random.default_rng(seed)
    stages, pieces = shape

    def table():
        return np.tile(1 - spread + spread * 2 * random.random((stages, pieces)), (1, sequences))

    return replace(
        abstract_costs(stages, num_units=pieces * sequences, links=wires),
        forward_s=table(),
        backward_s=2 * table(),
        weight_s=table(),
        reduce_s=random.random(stages),
        message_bytes=np.tile(random.random(pieces), sequences),
    )


def without_backward(costs, stages):
    """The same costs, if nothing trains in the first stages."""
    has_backward = np.arange(costs.num_stages) >= stages
    tables = {name: getattr(costs, name) for name in ("backward_s", "weight_s")}
    return replace(
        costs,
        reduce_s=costs.reduce_s * has_backward,
        **{name: table * has_backward[:, None] for name, table in tables.items()},
    )


def played(costs, *, sequences=1):
    pieces = costs.num_units // sequences
    return play(costs, lengths=((16,) * pieces,) * sequences).makespan_s


@settings(max_examples=examples(25, all=60))
@given(shapes, seeds, st.integers(2, 4))
def test_several_sequences_take_at_least_as_long(shape, seed, sequences):
    costs = random_costs(shape, seed=seed, sequences=sequences, spread=0.3)
    bound = step_time(costs, num_sequences=sequences).step_s
    assert bound * (1 - 1e-9) <= played(costs, sequences=sequences) <= bound * GAP


@settings(max_examples=examples(40, all=120))
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 7)),
    seeds,
    st.floats(0, 1),
    st.sampled_from([0.2, 1.0, 5.0]),
    st.booleans(),
)
def test_a_simulated_copy_never_waits_longer(shape, seed, ratio, rate, last_stays):
    """The simulator lets copies out lag behind; the closed form holds up compute for them."""
    ranks, virtual, pieces = shape
    costs = random_costs((ranks * virtual, pieces), seed=seed)
    offloaded = costs.activation_bytes * ratio
    offloaded[:, -1] *= not last_stays
    costs = replace(costs, offload_bytes=offloaded, copies=CopyEngines(rate, rate))
    name, looped = ("sppo", None) if virtual == 1 else ("looped_bfs", ranks)
    timeline = play(costs, lengths=((16,) * pieces,), schedule=name, num_virtual=virtual)
    time = step_time(costs, num_sequences=1, looped_ranks=looped)
    assert timeline.makespan_s <= time.step_s * (1 + 1e-9)
    free = replace(costs, offload_bytes=offloaded * 0)
    if looped is None and time == step_time(free, num_sequences=1):
        assert timeline.makespan_s == pytest.approx(time.step_s, rel=1e-9)


@settings(max_examples=examples(25, all=60))
@given(shapes, seeds, st.integers(1, 3), st.floats(0, 1), st.floats(1, 4))
def test_faster_copies_and_links_never_cost_time(shape, seed, sequences, ratio, faster):
    costs = random_costs(shape, seed=seed, sequences=sequences, wires=Links(Link(0.5, 1.0)))
    costs = replace(costs, offload_bytes=costs.activation_bytes * ratio)
    steps = [
        step_time(
            replace(costs, copies=CopyEngines(out, back), links=Links(Link(0.5 / wire, wire))),
            num_sequences=sequences,
        ).step_s
        for out, back, wire in ((1, 1, 1), (faster, 1, 1), (faster, faster, 1), (faster,) * 3)
    ]
    assert all(b <= a * (1 + 1e-12) for a, b in zip(steps, steps[1:], strict=False))


@pytest.mark.parametrize(("p", "n"), [(1, 1), (1, 8), (4, 1), (4, 16), (8, 5)])
def test_equal_units_take_what_the_paper_says(p, n):
    """T = (N + p - 1) / N * F(N), forward and backward (SPPO, section 6)."""
    time = step_time(abstract_costs(p, num_units=n), num_sequences=1)
    assert (time.step_s, time.update_s) == (3 * (n + p - 1), 0)


def test_a_copy_that_outlasts_its_unit_is_waited_for():
    costs = replace(
        abstract_costs(1, num_units=4),
        offload_bytes=np.array([[0.5, 0.5, 0.5, 0.0]]),
        copies=CopyEngines(1.0, 1.0),
    )
    assert step_time(costs, num_sequences=1).step_s == 12
    slow = replace(costs, copies=CopyEngines(0.25, 1.0))
    assert step_time(slow, num_sequences=1).step_s == pytest.approx(12 + 3)
    slow_back = replace(costs, copies=CopyEngines(1.0, 0.2))
    assert step_time(slow_back, num_sequences=1).step_s == pytest.approx(12 + 1.5)


def test_the_update_waits_for_the_slowest_stage_only_where_that_is_last():
    costs = replace(abstract_costs(2, num_units=1), reduce_s=np.array([0.25, 5.0]))
    assert step_time(costs, num_sequences=1).update_s == pytest.approx(5 - 2)
    assert step_time(costs, num_sequences=1).step_s == pytest.approx(1 + 1 + 2 + 5)


@settings(max_examples=examples(30, all=100))
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6)),
    st.integers(1, 5),
    seeds,
    links,
    st.sampled_from([0.3, 1.0]),
    st.booleans(),
)
def test_the_looped_order_takes_what_the_simulator_says(
    shape, sequences, seed, wires, spread, gradients_leave
):
    """Uneven stages and units, fewer units than ranks, several groups of sequences.

    If gradients leave, every group waits for the last reduction of each stage, which is no longer
    than a backward. One stage on each rank and one sequence are the plain order.
    """
    ranks, virtual, pieces = shape
    stages = ranks * virtual
    costs = random_costs(
        (stages, pieces), seed=seed, sequences=sequences, wires=wires, spread=spread
    )
    if gradients_leave and virtual > 1:
        waits = np.random.default_rng(seed).uniform(0, costs.backward_s.min(), stages)
        costs = replace(costs, last_reduction_wait_s=waits, streamed_gradient_bytes=np.ones(stages))
    lengths = ((16,) * pieces,) * sequences
    timeline = play(costs, lengths=lengths, schedule="looped_bfs", num_virtual=virtual)
    found = step_time(costs, num_sequences=sequences, looped_ranks=ranks)
    assert found.step_s == pytest.approx(timeline.makespan_s, rel=1e-9)
    if virtual == sequences == 1:
        assert step_time(costs, num_sequences=1).step_s == found.step_s


@settings(max_examples=examples(30, all=100))
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6)),
    st.integers(1, 3),
    seeds,
    st.data(),
)
def test_first_stages_without_backward_send_no_gradients_and_end_early(
    shape, sequences, seed, data
):
    """One group of sequences takes what the simulator says; several overlap there alone."""
    ranks, virtual, pieces = shape
    first = data.draw(st.integers(0, ranks * virtual - 1))
    costs = random_costs((ranks * virtual, pieces), seed=seed, sequences=sequences, spread=0.3)
    costs = without_backward(costs, first)
    name, looped = ("sppo", None) if virtual == 1 else ("looped_bfs", ranks)
    lengths = ((16,) * pieces,) * sequences
    timeline = play(
        costs,
        lengths=lengths,
        schedule=name,
        num_virtual=virtual,
        forward_only_stages=first,
    )
    found = step_time(
        costs, num_sequences=sequences, looped_ranks=looped, forward_only_stages=first
    ).step_s
    ratio = timeline.makespan_s / found
    one_group = len(sequence_groups(lengths, num_ranks=ranks)) == 1
    if sequences == 1 or (looped and one_group):
        assert ratio == pytest.approx(1.0, rel=1e-9)
    elif looped:
        assert 1 / GAP <= ratio <= 1 + 1e-9
    else:
        assert 1 - 1e-9 <= ratio <= GAP
