"""Tensors that stay on the device, in place or on a stack, and who owns what is taken."""

import pytest
import torch

from sppo.activations.activation_layout import ActivationKey, Extent, OffloadSchedule
from sppo.offload.block_store import BlockStore
from sppo.offload.lane import Lane
from sppo.offload.retained import RetainedTensors, stacked_bytes

KEYS = [ActivationKey(0, subsequence, layer) for subsequence in range(2) for layer in range(3)]
KEY, OTHER = KEYS[:2]


def saved(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(7, 5, generator=generator).bfloat16(),
        "lse": torch.randn(3, 7, generator=generator),
    }


def stacked(times, *, poison=False):
    """A store whose stack has room for some of :func:`saved`."""
    store = BlockStore()
    store.retained = RetainedTensors(in_stack=True, poison=poison)
    store.retained.reserve(times * (stacked_bytes((7, 5), 2) + stacked_bytes((3, 7), 4)))
    return store


def test_a_part_of_a_tensor_does_not_keep_all_of_it():
    whole = torch.randn(8, 6)
    parts = {"first": whole[:3], "columns": whole[:, 2:4], "reshaped": torch.randn(12).view(3, 4)}
    store = BlockStore()
    store.put(KEY, retained=parts)
    _, taken = store.get(KEY)
    for name, part in parts.items():
        assert torch.equal(taken[name], part)
        assert taken[name].untyped_storage().nbytes() == 4 * part.numel()
    assert taken["reshaped"] is parts["reshaped"]


def test_a_key_is_put_once_and_got_once():
    store = BlockStore()
    store.put(KEY, retained=saved(0))
    with pytest.raises(AssertionError, match="saved already"):
        store.put(KEY, retained=saved(0))
    store.get(KEY)
    with pytest.raises(AssertionError, match="is not saved"):
        store.get(KEY)


def test_a_stack_gives_back_last_what_came_first_bit_for_bit():
    store = stacked(len(KEYS))
    for seed, key in enumerate(KEYS):
        tensors = saved(seed)
        store.put(key, retained=tensors)
        tensors["x"].zero_()  # a copy is saved
    for seed, key in reversed(list(enumerate(KEYS))):
        _, taken = store.get(key)
        assert all(torch.equal(taken[name], tensor) for name, tensor in saved(seed).items())
        store.free(key)
    assert (store.num_entries, store.retained.held.now) == (0, 0)
    assert store.retained.held.peak == len(KEYS) * (70 + 84)


def test_the_order_and_the_room_of_a_stack_are_kept():
    store = stacked(2)
    store.put(KEY, retained=saved(0))
    store.put(OTHER, retained=saved(1))
    with pytest.raises(AssertionError, match="saved later"):
        store.get(KEY)
    with pytest.raises(AssertionError, match="not within the arena"):
        store.put(KEYS[2], retained={"x": torch.zeros(10_000)})


@pytest.fixture
def on_a_disk(tmp_path):
    """A store with a block on a disk."""
    store = BlockStore(Lane(), disk=tmp_path, source_lag=0, debug=True)
    store.prepare(OffloadSchedule({KEY: Extent(0, 4096)}, [KEY], staging_slots=2, ring_slots=2))
    yield store
    store.close()


@pytest.mark.parametrize("owned", [True, False])
@pytest.mark.parametrize("kind", ["stack", "block"])
def test_owned_tensors_outlive_the_stores_memory_and_lent_ones_do_not(kind, owned, on_a_disk):
    if kind == "stack":
        store = stacked(1, poison=True)
        store.put(KEY, retained={"x_in": saved(0)["x"]})
    else:
        store = on_a_disk
        store.put(KEY, offloaded={"x_in": saved(0)["x"]})
        store.permit([KEY])
    offloaded, retained = store.get(KEY, owned=owned)
    store.free(KEY)
    assert (offloaded | retained)["x_in"].isnan().all() != owned
