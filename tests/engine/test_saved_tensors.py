"""Ownership of a unit's saved tensors: memory of the stores, or memory of the caller."""

import pytest
import torch

from sppo.activations.activation_layout import (
    ActivationKey,
    Extent,
    OffloadSchedule,
    packed_offsets,
)
from sppo.engine.saved_tensors import SavedTensors
from sppo.offload.block_store import BlockStore
from sppo.offload.cpu_lane import CpuLane
from sppo.offload.device_stores import DeviceStore, LifoArenaStore, slot_bytes

KEY = ActivationKey(0, 0, 0)
X_IN = torch.arange(12.0).view(4, 3)


def stack():
    store = LifoArenaStore(poison=True)
    store.reserve(slot_bytes(X_IN.shape, 4))
    return store


def disk(directory, offloaded_rows):
    _, size = packed_offsets({"x_in": X_IN[:offloaded_rows].numel() * 4})
    store = BlockStore(CpuLane(), disk=directory, source_lag=0, debug=True)
    store.prepare(OffloadSchedule({KEY: Extent(0, size)}, [KEY], staging_slots=2, ring_slots=2))
    return store


@pytest.fixture
def saved(tmp_path):
    """Save ``X_IN`` with its first rows on a disk and the others in the store named."""
    on_disk = []

    def save(retained, offloaded_rows):
        if offloaded_rows:
            on_disk.append(disk(tmp_path, offloaded_rows))
        kept_store = stack() if retained == "stack" else DeviceStore()
        stores = SavedTensors(kept_store, on_disk[0] if on_disk else None)
        stores.save(
            KEY,
            {"x_in": X_IN.clone()},
            offloaded_rows={"x_in": offloaded_rows} if offloaded_rows else {},
            retained_rows={"x_in": rest} if (rest := len(X_IN) - offloaded_rows) else {},
        )
        for store in on_disk:
            store.permit([KEY])
        return stores

    yield save
    for store in on_disk:
        store.close()


@pytest.mark.parametrize(
    ("retained", "offloaded_rows"), [("stack", 0), ("device", 4), ("device", 2)]
)
def test_owned_tensors_outlive_the_stores_memory(saved, retained, offloaded_rows):
    stores = saved(retained, offloaded_rows)
    owned = stores.take_owned(KEY)
    stores.release(KEY)
    assert torch.equal(owned["x_in"], X_IN)


@pytest.mark.parametrize(("retained", "offloaded_rows"), [("stack", 0), ("device", 4)])
def test_lent_tensors_do_not(saved, retained, offloaded_rows):
    stores = saved(retained, offloaded_rows)
    lent = stores.take(KEY)
    stores.release(KEY)
    assert lent["x_in"].isnan().all()
