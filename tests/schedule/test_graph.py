"""Longest paths: times of services whose order on every resource is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.schedule.graph import NOWHERE, Edges, Standstill, in_turn, longest_paths
from tests.tiers import examples


def edges_of(*waits: tuple[int, int, float]) -> Edges:
    """Edges of (earlier, later, lag)."""
    earlier, later, lags = zip(*waits, strict=True) if waits else ((), (), ())
    ends = (np.array(column, dtype=np.int64) for column in (earlier, later))
    return Edges.of(*ends, lag_s=np.array(lags, dtype=np.float64))


@settings(max_examples=examples(40, all=200))
@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_every_service_ends_with_the_latest_of_its_waits(services, num_ranks, seed):
    dice = np.random.default_rng(seed)
    ranks, seconds = dice.integers(0, num_ranks, services), dice.uniform(0, 2, services)
    waits = [
        (earlier, later, float(dice.uniform(0, 1)))
        for later in range(services)
        for earlier in range(later)
        if dice.random() < 0.2
    ]
    expected = []
    for service in range(services):
        starts = [expected[earlier] + lag for earlier, later, lag in waits if later == service]
        expected.append(max(starts, default=0.0) + seconds[service])
    # Numbers of services say nothing about their order, which the turns tell.
    names = dice.permutation(services)
    turns, of_ranks, lasts = (np.empty_like(c) for c in (names, ranks, seconds))
    turns[names], of_ranks[names], lasts[names] = np.arange(services), ranks, seconds
    named = [(names[earlier], names[later], lag) for earlier, later, lag in waits]
    ends = longest_paths(edges_of(*named), seconds=lasts, ranks=of_ranks, turns=turns)
    assert ends[names].tolist() == expected


def test_services_that_wait_for_each_other_stand_still_and_all_behind_them():
    ranks, turns = np.array([0, 0, 1, 1, 2]), np.arange(5)
    edges = edges_of((0, 1, 0.0), (3, 1, 0.0), (1, 2, 0.0), (2, 3, 0.0), (3, 4, 0.0))
    with pytest.raises(Standstill) as raised:
        longest_paths(edges, seconds=np.ones(5), ranks=ranks, turns=turns)
    assert raised.value.services == [(1, 3), (2, 1), (4, 3)]


def test_what_never_happens_is_waited_for_forever():
    edges = edges_of((1, 0, 0.0))
    with pytest.raises(Standstill) as raised:
        longest_paths(edges, seconds=np.ones(2), ranks=np.array([0, NOWHERE]), turns=np.arange(2))
    assert raised.value.services == [(0, 1)]


def test_a_resource_serves_in_turn():
    earlier, later = in_turn(
        np.array([7, 8, 9, 5]), resources=np.array([1, 0, 1, 1]), turns=np.array([4, 9, 2, 4])
    )
    assert [*zip(earlier.tolist(), later.tolist(), strict=True)] == [(9, 7), (7, 5)]
