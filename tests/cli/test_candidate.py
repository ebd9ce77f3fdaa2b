"""Groups of ranks with equal memory, and names of buckets."""

from __future__ import annotations

from dataclasses import replace

from sppo.cli.candidate import rank_groups, shown_groups
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


def test_words_for_buckets():
    assert bucket_text("kv_gradients") == bucket_text("kv_gradients_bytes") == "dK and dV"
    assert bucket_text("offloaded activations") == "offloaded activations"
