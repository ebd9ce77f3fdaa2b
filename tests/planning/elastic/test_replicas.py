"""Samples divided over replicas: each sample once, no replica far above the others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo.planning.elastic.packing import divide_samples

SECONDS = st.floats(1e-6, 1e3)


@given(st.lists(SECONDS, min_size=1, max_size=60), st.integers(1, 8))
def test_every_sample_goes_to_one_replica_and_none_has_a_third_too_much(seconds, replicas):
    replicas = min(replicas, len(seconds))
    divided = divide_samples(seconds, replicas=replicas)
    assert sorted(index for samples in divided for index in samples) == list(range(len(seconds)))
    assert all(samples and list(samples) == sorted(samples) for samples in divided)
    most = max(sum(seconds[index] for index in samples) for samples in divided)
    # No division is better than these; Graham's bound of the costliest-first rule is 4/3 - 1/(3m).
    descending = sorted(seconds, reverse=True)
    pair = sum(descending[replicas - 1 : replicas + 1]) if len(seconds) > replicas else 0.0
    least = max(sum(seconds) / replicas, descending[0], pair)
    # What ends last began when no replica had less than the mean of the others.
    assert most <= least + descending[0] * (1 - 1 / replicas) * (1 + 1e-9)
    assert most <= (4 / 3 - 1 / (3 * replicas)) * best(seconds, replicas) * (1 + 1e-9)


def best(seconds, replicas):
    """Seconds of the best division of few samples; of many, what no division is below by 4/3."""
    if len(seconds) > 8:
        return float("inf")
    totals = {(0.0,) * replicas}
    for each in seconds:
        totals = {
            tuple(sorted((*total[:place], total[place] + each, *total[place + 1 :])))
            for total in totals
            for place in range(replicas)
        }
    return min(max(total) for total in totals)


@given(st.lists(SECONDS, min_size=4, max_size=40))
def test_equal_costs_are_divided_alike_every_time(seconds):
    assert divide_samples(seconds, replicas=4) == divide_samples(list(seconds), replicas=4)
    counts = [len(samples) for samples in divide_samples([1.0] * len(seconds), replicas=4)]
    assert max(counts) - min(counts) <= 1


def test_every_replica_needs_a_sample():
    with pytest.raises(ValueError, match="2 samples for 3 data-parallel replicas: each needs one"):
        divide_samples([1.0, 1.0], replicas=3)
