"""Groups of equal stages, and bars of letters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sppo.cli.memory import memory_bar, rank_groups, shown_groups
from sppo.cost.memory.bucket_labels import BUCKETS, bucket_text
from sppo.cost.memory.stage_memory import MemoryBuckets, StageMemory

NOTHING = MemoryBuckets(*[0] * len(BUCKETS))


def stage(weights):
    return StageMemory(replace(NOTHING, weights_bytes=weights), 0, 0)


def test_equal_neighbours_are_one_group():
    groups = rank_groups([stage(5), stage(3), stage(3), stage(5)])
    assert groups == {"rank 0": stage(5), "ranks 1-2": stage(3), "rank 3": stage(5)}


def test_of_many_groups_the_ends_and_the_fullest_are_shown():
    groups = rank_groups([stage(n) for n in (1, 7, 2, 9, 3)])
    assert list(shown_groups(groups, most=3)) == ["rank 0", "rank 3", "rank 4"]
    assert list(shown_groups(groups, most=4)) == ["rank 0", "rank 1", "rank 3", "rank 4"]
    assert shown_groups(groups, most=5) == groups


def bar(*, budget, scale=10, width=10, **buckets):
    device = replace(NOTHING, **{f"{name}_bytes": size for name, size in buckets.items()})
    return memory_bar(device, budget_bytes=budget, scale_bytes=scale, width=width)


@pytest.mark.parametrize(
    ("buckets", "budget", "expected"),
    [
        ({}, 10, "··········│"),
        ({"weights": 2, "kv": 3}, 10, "WWKKK·····│"),
        ({"weights": 2, "kv": 8}, 10, "WWKKKKKKKK│"),
        ({"weights": 2, "kv": 8}, 5, "WWKKK│KKKKK"),
        ({"weights": 2}, 5, "WW···│"),
    ],
)
def test_a_bar(buckets, budget, expected):
    assert bar(budget=budget, **buckets) == expected


def test_many_small_buckets_add_up():
    """Each rounds to nothing alone; the bar is as long as their sum, 52 of 100."""
    assert len(BUCKETS) == 13
    small = {bucket.field.removesuffix("_bytes"): 4 for bucket in BUCKETS}
    assert len(bar(budget=100, scale=100, width=10, **small).split("·")[0]) == 5


def test_words_for_buckets():
    assert bucket_text("kv_gradients") == bucket_text("kv_gradients_bytes") == "dK and dV"
    assert bucket_text("offloaded activations") == "offloaded activations"
