import pytest
import torch

from sppo.activations.activation_layout import ActivationKey
from sppo.offload.device_stores import LifoArenaStore, slot_bytes

KEYS = [ActivationKey(0, subsequence, layer) for subsequence in range(2) for layer in range(3)]


def saved(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(7, 5, generator=generator).bfloat16(),
        "lse": torch.randn(3, 7, generator=generator),
    }


def capacity(times):
    return times * (slot_bytes((7, 5), 2) + slot_bytes((3, 7), 4))


def test_tensors_come_back_bit_for_bit_last_in_first_out():
    store = LifoArenaStore()
    store.reserve(capacity(len(KEYS)))
    for seed, key in enumerate(KEYS):
        store.save(key, saved(seed))
    for seed, key in reversed(list(enumerate(KEYS))):
        taken = store.take(key)
        store.release(key)
        assert all(torch.equal(taken[name], tensor) for name, tensor in saved(seed).items())
    assert (store.num_entries, store.held.now) == (0, 0)
    assert store.held.peak == len(KEYS) * (70 + 84)


def test_what_is_saved_is_a_copy():
    store, tensors = LifoArenaStore(), saved(0)
    store.reserve(capacity(1))
    store.save(KEYS[0], tensors)
    tensors["x"].zero_()
    assert torch.equal(store.take(KEYS[0])["x"], saved(0)["x"])


def test_released_tensors_are_poisoned_for_debugging():
    store = LifoArenaStore(poison=True)
    store.reserve(capacity(1))
    store.save(KEYS[0], saved(0))
    taken = store.take(KEYS[0])
    assert torch.equal(taken["x"], saved(0)["x"])
    store.release(KEYS[0])
    assert all(tensor.isnan().all() for tensor in taken.values())


def test_more_than_was_reserved_is_refused():
    store = LifoArenaStore()
    store.reserve(capacity(1))
    store.save(KEYS[0], saved(0))
    with pytest.raises(ValueError, match="not within the arena"):
        store.save(KEYS[1], {"x": torch.zeros(10_000)})


def test_the_order_is_kept():
    store = LifoArenaStore()
    store.reserve(capacity(2))
    store.save(KEYS[0], saved(0))
    store.save(KEYS[1], saved(1))
    with pytest.raises(AssertionError, match="saved already"):
        store.save(KEYS[1], saved(1))
    with pytest.raises(AssertionError, match="saved later"):
        store.take(KEYS[0])


def test_a_larger_step_gets_more_room_and_a_smaller_one_keeps_it():
    store = LifoArenaStore()
    for times in (1, 4, 2):
        store.reserve(capacity(times))
        for seed, key in enumerate(KEYS[:times]):
            store.save(key, saved(seed))
        for key in reversed(KEYS[:times]):
            store.take(key)
            store.release(key)
        assert (store.num_entries, store.held.now) == (0, 0)
