"""Multiplexed sequence partitioning: the paper's table, its gain, and when it is not used."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.schedule.actions import ActionKind, Placement
from sppo.schedule.checks import check_deadlock_free, validate
from sppo.schedule.costs import Link, Links, abstract_costs
from sppo.schedule.msp_costs import msp_seconds
from sppo.schedule.msp_groups import MspGroup, balanced_shards, routes_between
from sppo.schedule.multiplexing import multiplex as multiplexing
from sppo.schedule.multiplexing.cut_steps import CutSteps
from sppo.schedule.multiplexing.multiplex import multiplexed_ranks
from sppo.schedule.orders.names import order_of
from sppo.schedule.program import generate, lower
from sppo.schedule.simulation.simulate import simulate
from sppo.schedule.transfers.communication import place_messages
from tests.schedule.cases import make, play
from tests.tiers import examples


def shards(schedule):
    return sum(a.num_shards > 1 for program in schedule.programs for a in program)


def test_table_3_of_the_paper():
    """P=4, N=8, as printed."""
    ranks = {
        (stage, unit): multiplexed_ranks(stage, unit=unit, placement=Placement(4), num_units=8)
        for stage in range(4)
        for unit in range(8)
    }
    left = {(0, 0): 0, (0, 1): 0, (0, 2): 0, (1, 0): 1, (1, 1): 1, (2, 0): 2}
    right = {(1, 7): 1, (2, 6): 2, (2, 7): 2, (3, 5): 3, (3, 6): 3, (3, 7): 3}
    for key, found in ranks.items():
        if key in left:
            assert found == range(left[key], 4)
        elif key in right:
            assert found == range(right[key] + 1)
        else:
            assert found == range(key[0], key[0] + 1)


@pytest.mark.parametrize(
    ("p", "n", "forward", "step", "plain"),
    [(2, 4, 4, 12, 15), (4, 8, 25 / 3, 25, 33)],
)
def test_unit_costs_and_free_messages(p, n, forward, step, plain):
    assert play(make("sppo_msp", p=p, n=n, m=1, forward_only=True)).makespan_s == pytest.approx(
        forward
    )
    assert play(make("sppo_msp", p=p, n=n, m=1)).makespan_s == pytest.approx(step)
    assert play(make("sppo", p=p, n=n, m=1)).makespan_s == plain


@pytest.mark.parametrize(("p", "n", "step", "plain"), [(2, 4, 24, 27), (4, 8, 49, 57)])
def test_of_several_stages_on_a_rank_the_first_and_the_last_are_shared(p, n, step, plain):
    """Half of the layers each, so the same work takes twice as many units of time."""
    schedule = make("sppo_msp", p=p, n=n, m=1, v=2)
    assert play(schedule).makespan_s == pytest.approx(step)
    assert play(make("looped_bfs", p=p, n=n, m=1, v=2)).makespan_s == plain
    assert play(make("sppo_msp", p=p, n=n, m=3, v=2)).makespan_s == pytest.approx(3 * step)
    for rank, program in enumerate(schedule.programs):
        own = [a.stage // p for a in program if a.stage % p == rank and a.kind is ActionKind.F]
        assert own == sorted(own)


@pytest.mark.parametrize("v", [1, 2])
def test_backward_is_the_mirror_image_on_the_same_ranks(v):
    schedule = make("sppo_msp", p=4, n=8, m=1, v=v)
    for program in schedule.programs:
        forward = [a._replace(kind=ActionKind.B) for a in program if a.kind is ActionKind.F]
        assert [a for a in program if a.kind is ActionKind.B] == forward[::-1]


def priced(stages, n, *, bandwidth, weights=1.0, factors=None):
    base = abstract_costs(stages, num_units=n, unit_factors=factors)
    return replace(
        base,
        links=Links(Link(1e-3, bandwidth)),
        message_bytes=np.full(n, 0.01),
        weight_bytes=np.full(stages, weights),
        weight_gradient_bytes=np.full(stages, 2 * weights),
        kv_bytes=np.full((stages, n), 0.01),
        kv_gradient_bytes=np.full((stages, n), 0.02),
        context_slope=1e-3,
    )


def test_communication_decides_how_many_units_are_cut():
    counts, makespans = [], []
    for bandwidth in (100, 1.5, 1):
        costs = priced(4, 8, bandwidth=bandwidth)
        schedule = make("sppo_msp", p=4, n=8, m=1, tokens=64, costs=costs)
        counts.append(shards(schedule))
        makespans.append(simulate(schedule, costs=costs).makespan_s)
    assert counts[0] > counts[1] > counts[2] == 0
    assert makespans == sorted(makespans)


@pytest.mark.parametrize("bandwidth", [100, 3, 1.5])
def test_what_pays_is_found_without_the_stages_between(monkeypatch, bandwidth):
    """As fast as what a search over all stages finds, and as much of it."""
    costs = priced(12, 8, bandwidth=bandwidth)
    found = make("sppo_msp", p=4, n=8, m=1, v=3, tokens=64, costs=costs)
    monkeypatch.setattr(multiplexing, "_ENDS", 3)
    whole = make("sppo_msp", p=4, n=8, m=1, v=3, tokens=64, costs=costs)
    assert shards(found) == shards(whole)
    seconds = [simulate(each, costs=costs).makespan_s for each in (found, whole)]
    assert seconds[0] == pytest.approx(seconds[1])


@pytest.mark.parametrize("most", [0, 1, 3, 5])
def test_ranks_share_units_in_as_many_ranges_as_they_may(most):
    costs = priced(6, 12, bandwidth=1e3)
    shared, limited = (
        make("sppo_msp", p=6, n=12, m=1, tokens=64, costs=replace(costs, links=links))
        for links in (costs.links, replace(costs.links, most_ranges=most))
    )
    found = limited.msp_groups.values()
    ranges = {group.ranks for group in found}
    counts = [sum(rank in ranks for ranks in ranges) for rank in range(6)]
    assert max(counts) <= most < shards(shared)
    assert (most == 0) == (shards(limited) == 0)


def test_collectives_take_as_long_where_a_unit_is_shared():
    costs = priced(4, 8, bandwidth=100)
    schedule = make("sppo_msp", p=4, n=8, m=1, tokens=64, costs=costs)
    groups = schedule.msp_groups
    alone, reducing = (
        msp_seconds(schedule, groups=groups, costs=replace(costs, unit_collectives_s=each * 4))
        for each in ((), ((0.0, 2.5),))
    )
    for slot in groups:
        assert alone[0, slot] == reducing[0, slot]
        assert alone[1, slot] < 2.5 < reducing[1, slot] < 2.5 + alone[1, slot]


@settings(max_examples=25)
@given(
    st.integers(1, 4),
    st.lists(st.integers(1, 8), min_size=1, max_size=8),
    st.integers(1, 2),
    st.sampled_from((1, 2, 3)),
    st.sampled_from((1e3, 5.0, 2.0, 0.2)),
)
def test_it_never_makes_a_step_slower(p, factors, m, v, bandwidth):
    n = len(factors)
    costs = priced(p * v, n * m, bandwidth=bandwidth, factors=factors * m)
    case = {"num_ranks": p, "num_virtual": v, "lengths": ((64,) * n,) * m}
    cut = generate("sppo_msp", **case, costs=costs)
    validate(cut)
    plain = generate(order_of("sppo_msp", num_virtual=v), **case)
    before = simulate(plain, costs=costs).makespan_s
    after = simulate(lower(cut, costs=costs), costs=costs).makespan_s
    assert after <= before + 1e-9


@settings(max_examples=examples(20, all=60))
@given(
    st.integers(2, 4),
    st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=7), min_size=1, max_size=3),
    st.sampled_from((1, 2, 3)),
    st.sampled_from((1e3, 5.0, 0.2)),
    st.randoms(use_true_random=False),
)
def test_a_walk_takes_as_long_as_the_program(p, factors, v, bandwidth, dice):
    """Whatever is cut, of sequences that differ too, also if first stages have no backward."""
    forward_only = dice.choice([0, dice.randrange(p * v)])
    every = [factor for sequence in factors for factor in sequence]
    costs = priced(p * v, len(every), bandwidth=bandwidth, factors=every)
    links = {(a, b): Link(1e-3 * a, bandwidth + b) for a in range(p) for b in range(p)}
    costs = replace(
        costs,
        links=Links(between=links),
        message_bytes=np.array(every) * 0.1,
        reduce_s=np.arange(p * v) * 0.3,
    )
    lengths = [[16 * factor for factor in sequence] for sequence in factors]
    case = {"num_ranks": p, "num_virtual": v, "lengths": lengths}
    name = order_of("sppo_msp", num_virtual=v)
    plain = generate(name, **case, forward_only_stages=forward_only)
    groups = multiplexing._possible_groups(plain, costs=costs)
    steps = CutSteps(plain, costs=costs, groups=groups, forward_only_stages=forward_only)
    chosen = {slot: group for slot, group in groups.items() if dice.random() < 0.6}
    program = steps.program(chosen)
    validate(program)
    passes = {slot: 2 - (slot < forward_only * len(every)) for slot in chosen}
    assert shards(program) == sum(len(g.ranks) * passes[slot] for slot, g in chosen.items())
    check_deadlock_free(place_messages(program, costs=costs))
    assert steps.step_s(chosen) == simulate(program, costs=costs).makespan_s


@pytest.mark.parametrize(("p", "n", "m", "v"), [(2, 4, 1, 1), (4, 8, 2, 1), (3, 7, 1, 3)])
def test_ranks_reduce_and_update_at_the_same_time(p, n, m, v):
    """None of them keeps others waiting, whose units it runs shards of, until its own are done."""
    costs = priced(p * v, n * m, bandwidth=1e3)
    schedule = make("sppo_msp", p=p, n=n, m=m, v=v, tokens=64, costs=costs)
    assert shards(schedule)
    updating = replace(costs, reduce_s=np.where(np.arange(p * v) < p, 100.0, 0.0))
    before, after = (simulate(schedule, costs=each).makespan_s for each in (costs, updating))
    assert after <= before + 100.0 + 1e-9


def test_several_sequences_follow_each_other_unless_overlapping_is_faster():
    two, twelve = make("sppo_msp", p=4, n=8, m=2), make("sppo_msp", p=4, n=8, m=12)
    assert play(two).makespan_s == pytest.approx(50)
    assert play(make("sppo", p=4, n=8, m=2)).makespan_s == 57
    assert shards(twelve) == 0


def test_a_unit_shorter_than_its_msp_group_stays_whole():
    schedule = make("sppo_msp", p=4, n=8, m=1, tokens=2)
    assert {a.num_shards for program in schedule.programs for a in program} <= {1, 2}


def test_a_pipeline_of_many_msp_groups_is_still_chosen():
    """More MSP groups than are tried one by one."""
    schedule = make("sppo_msp", p=9, n=18, m=1)
    assert play(schedule).makespan_s < play(make("sppo", p=9, n=18, m=1)).makespan_s
    assert shards(schedule) > 0


@given(st.integers(1, 200), st.integers(1, 8), st.integers(0, 500), st.floats(0, 1))
def test_balanced_shards_add_up_and_later_ones_are_not_longer(tokens, count, start, slope):
    count = min(count, tokens)
    parts = balanced_shards(tokens, num_shards=count, start=start, context_slope=slope)
    assert sum(parts) == tokens
    assert len(parts) == count
    assert min(parts) >= 1
    assert all(b <= a + 1 for a, b in zip(parts, parts[1:], strict=False))


cuts = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@given(cuts, cuts)
def test_routes_carry_every_token_once(out, into):
    into = [*into, max(0, sum(out) - sum(into))]
    out = [*out, sum(into) - sum(out)]
    producer = [(k, tokens) for k, tokens in enumerate(out) if tokens]
    consumer = [(10 + k, tokens) for k, tokens in enumerate(into) if tokens]
    routes = routes_between(producer, consumer)
    total = sum(out)
    for rank, tokens in producer:
        assert sum(r.share for r in routes if r.sender == rank) == pytest.approx(tokens / total)
    for rank, tokens in consumer:
        assert sum(r.share for r in routes if r.receiver == rank) == pytest.approx(tokens / total)
    assert len(routes) <= len(producer) + len(consumer) - 1


def test_helpers_get_everything_for_every_unit():
    costs = replace(
        abstract_costs(3, num_units=6, forward_s=0.0, backward_s=0.0),
        kv_bytes=np.ones((3, 6)),
        links=Links(Link(0.0, 1.0)),
    )
    schedule = make("sppo", p=3, n=6, m=1)
    groups = {slot: MspGroup((0, 1, 2), (16,)) for slot in (0, 2 * 6 + 4, 2 * 6 + 5)}
    seconds = msp_seconds(schedule, groups=groups, costs=costs)
    # Stage 2, right units 4 and 5 on ranks 0..2, behind four and five units.
    assert seconds[0, 2 * 6 + 4] == pytest.approx(4 + 1)
    assert seconds[0, 2 * 6 + 5] == pytest.approx(5 + 1)
    assert seconds[0, 0] == pytest.approx(1)
    # Their K/V again, their own complete gradients back.
    assert seconds[1, 2 * 6 + 4] == pytest.approx(4 + 1 + 1)
