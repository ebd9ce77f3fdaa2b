"""Measured memory buckets of steps, and their comparison with the plan's."""

import sys

import pytest

from sppo.cost.memory.process_growth import POOL_FREE_BYTES
from sppo.cost.memory.stage_memory import MemoryBuckets
from sppo.engine.engine import EnginePeaks
from sppo.kernels.native.process_memory import file_bytes, resident_bytes
from sppo.training.devices.cpu_device import PoolUse
from sppo.training.records.outcome import MeasuredBuckets, predicted_and_measured

PLANNED = MemoryBuckets(
    weights_bytes=10,
    gradients_bytes=20,
    optimizer_bytes=40,
    kv_bytes=5,
    kv_gradients_bytes=5,
    activations_bytes=100,
    copies_bytes=0,
    loss_gradient_bytes=7,
    working_bytes=60,
    communication_bytes=4,
    growth_bytes=POOL_FREE_BYTES + 30,
)
NOTHING = EnginePeaks(0, 0, 0, 0, 0)


def measured(*uses):
    buckets = MeasuredBuckets()
    for use in uses:
        buckets.count_step(NOTHING, copies_bytes=0, pool=use)
    return buckets


def test_free_memory_of_the_pool_is_no_growth_of_the_process():
    buckets = measured(PoolUse(100, 150, 170), PoolUse(100, 160, 175))
    assert (buckets.working_bytes, buckets.free_bytes) == (60, 20)
    found = predicted_and_measured(PLANNED, buckets, all_bytes=110)
    assert found["working set"] == (64, 60)
    assert found["free in the pool"] == (POOL_FREE_BYTES, 20)
    assert found["process growth"] == (30, 110 - 60 - 20)


def test_an_allocator_that_does_not_count_free_memory_counts_it_as_growth():
    found = predicted_and_measured(PLANNED, measured(PoolUse(100, 160)), all_bytes=110)
    assert "free in the pool" not in found
    assert found["process growth"] == (POOL_FREE_BYTES + 30, 110 - 60)


def test_a_process_never_shrinks():
    found = predicted_and_measured(PLANNED, measured(PoolUse(100, 160, 170)), all_bytes=40)
    assert found["process growth"] == (30, 0)


def test_the_predictions_add_up():
    for buckets in (measured(PoolUse(0, 1, 2)), measured(PoolUse(0, 1)), MeasuredBuckets()):
        found = predicted_and_measured(PLANNED, buckets, all_bytes=110)
        whole = found.pop("all")
        assert sum(predicted for predicted, _ in found.values()) == whole[0]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell pages apart")
def test_pages_of_files_are_a_part_of_the_resident_pages():
    assert 0 < file_bytes() < resident_bytes()
