import pytest
import torch

from sppo.activations.activation_layout import ActivationKey
from sppo.offload.device_stores import DeviceStore

KEY, OTHER = ActivationKey(0, 1, 2), ActivationKey(0, 1, 3)


def tensors(*sizes):
    return {f"t{i}": torch.randn(size) for i, size in enumerate(sizes)}


def test_tensors_come_back_as_they_are():
    store, saved = DeviceStore(), tensors(3, 5)
    store.save(KEY, saved)
    taken = store.take(KEY)
    store.release(KEY)
    assert taken.keys() == saved.keys()
    assert all(taken[name] is saved[name] for name in saved)


def test_bytes_and_entries_are_counted():
    store = DeviceStore()
    store.save(KEY, {"x": torch.zeros(3, 5), "lse": torch.zeros(4, dtype=torch.bfloat16)})
    store.save(OTHER, {"x": torch.zeros(2)})
    assert (store.held.now, store.num_entries, store.held.peak) == (76, 2, 76)
    store.take(KEY)
    assert (store.held.now, store.num_entries, store.held.peak) == (8, 1, 76)


def test_bytes_of_a_key_whose_tensors_were_consumed_are_given_back():
    """Backward pops tensors out of what it took."""
    store = DeviceStore()
    store.save(KEY, tensors(3))
    store.take(KEY).clear()
    assert (store.held.now, store.num_entries) == (0, 0)


def test_a_part_of_a_tensor_does_not_keep_all_of_it():
    whole = torch.randn(8, 6)
    parts = {"first": whole[:3], "columns": whole[:, 2:4], "reshaped": torch.randn(12).view(3, 4)}
    store = DeviceStore()
    store.save(KEY, parts)
    taken = store.take(KEY)
    for name, part in parts.items():
        assert torch.equal(taken[name], part)
        assert taken[name].untyped_storage().nbytes() == 4 * part.numel()
    assert taken["reshaped"] is parts["reshaped"]


def test_a_key_is_saved_once():
    store = DeviceStore()
    store.save(KEY, tensors(3))
    with pytest.raises(AssertionError, match="saved already"):
        store.save(KEY, tensors(3))


def test_a_key_is_taken_once():
    store = DeviceStore()
    store.save(KEY, tensors(3))
    store.take(KEY)
    with pytest.raises(KeyError):
        store.take(KEY)
