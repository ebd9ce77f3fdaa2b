"""What of a unit's saved tensors is lent by the stores, and what is the caller's own."""

import pytest
import torch

from sppo.activations.block_layout import packed_offsets
from sppo.engine.saved_rows import TensorRows
from sppo.engine.saved_tensors import SavedTensors
from sppo.offload.moving_store import Itinerary, MovingStore, Place
from sppo.offload.stack_store import StackStore, slot_bytes
from sppo.offload.store import ActivationKey, ResidentStore
from sppo.offload.thread_queues import ThreadQueues
from sppo.offload.tiers import Tier

KEY = ActivationKey(0, 0, 0)
X_IN = torch.arange(12.0).view(4, 3)


def stack():
    store = StackStore(poison=True)
    store.reserve(slot_bytes(X_IN.shape, 4))
    return store


def disk(directory, moved_rows):
    _, size = packed_offsets({"x_in": X_IN[:moved_rows].numel() * 4})
    store = MovingStore(ThreadQueues(poison=True), tier=Tier("disk", directory), source_lag=0)
    store.prepare(Itinerary({KEY: Place(0, size)}, [KEY], staging_slots=2, ring_slots=2))
    return store


@pytest.fixture
def saved(tmp_path):
    """Save ``X_IN`` with its first rows on a disk and the others in the store named."""
    on_disk = []

    def save(kept, moved_rows):
        if moved_rows:
            on_disk.append(disk(tmp_path, moved_rows))
        kept_store = stack() if kept == "stack" else ResidentStore()
        stores = SavedTensors(kept_store, on_disk[0] if on_disk else None)
        rows = TensorRows(moved_rows, len(X_IN) - moved_rows)
        stores.save(KEY, {"x_in": X_IN.clone()}, {"x_in": rows})
        return stores

    yield save
    for store in on_disk:
        store.close()


@pytest.mark.parametrize(("kept", "moved_rows"), [("stack", 0), ("device", 4), ("device", 2)])
def test_owned_tensors_outlive_the_stores_memory(saved, kept, moved_rows):
    stores = saved(kept, moved_rows)
    owned = stores.take_owned(KEY)
    stores.release(KEY)
    assert torch.equal(owned["x_in"], X_IN)


@pytest.mark.parametrize(("kept", "moved_rows"), [("stack", 0), ("device", 4)])
def test_lent_tensors_do_not(saved, kept, moved_rows):
    stores = saved(kept, moved_rows)
    lent = stores.take(KEY)
    stores.release(KEY)
    assert lent["x_in"].isnan().all()
