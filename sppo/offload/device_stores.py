"""Stores of saved tensors that stay on the device between forward and backward.

The engine saves named tensors under a key and takes them once. :class:`DeviceStore` leaves them in
the memory of torch's allocator. :class:`LifoArenaStore`, for a CPU that takes units in reverse
order of saving, copies them to one mapping of exactly their size.
:mod:`sppo.offload.block_store` has the store of tensors that leave the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

from torch import Tensor

from sppo.activations.activation_layout import ActivationKey
from sppo.offload.arena import ALIGNMENT_BYTES, HostArena
from sppo.offload.held_bytes import HeldBytes


class ActivationStore(Protocol):
    """Store of the tensors that a layer saves; every key is saved once and taken once."""

    held: HeldBytes
    """Bytes held on the device."""

    @property
    def lends_memory(self) -> bool:
        """True if :meth:`take` returns views of memory that is reused after :meth:`release`.

        Otherwise the taken tensors belong to the caller.
        """
        ...

    def reserve(self, capacity_bytes: int) -> None:
        """Reserve memory for ``capacity_bytes`` of tensors; the store must be empty."""
        ...

    def save(self, key: ActivationKey, tensors: dict[str, Tensor]) -> None:
        """Save ``tensors``, to which the caller must keep no reference.

        A view of a larger tensor does not keep the memory of the larger tensor.
        """
        ...

    def take(self, key: ActivationKey) -> dict[str, Tensor]:
        """Return the tensors saved under ``key``, unchanged, valid until :meth:`release`."""
        ...

    def look_up(self, key: ActivationKey, name: str) -> Tensor | None:
        """Return one saved tensor, which stays in the store; None if it is not saved."""
        ...

    def release(self, key: ActivationKey) -> None:
        """Allow reuse of the memory of taken tensors, after compute has read them."""
        ...

    @property
    def num_entries(self) -> int:
        """Number of keys saved and not yet taken (if memory is lent: not yet released)."""
        ...


class DeviceStore:
    """Store that keeps every saved tensor in place, in memory of the device's allocator.

    Args:
        whole: Counter to which the bytes of this store are added, together with others.
    """

    lends_memory = False

    def __init__(self, whole: HeldBytes | None = None) -> None:
        self._entries: dict[ActivationKey, dict[str, Tensor]] = {}
        self.held = HeldBytes(whole)

    def reserve(self, capacity_bytes: int) -> None:
        """Do nothing: saved tensors already have their memory."""

    def save(self, key: ActivationKey, tensors: dict[str, Tensor]) -> None:
        """Save ``tensors`` under ``key``; views of larger tensors are copied."""
        assert key not in self._entries, f"{key} is saved already"
        tensors = {name: on_its_own(tensor) for name, tensor in tensors.items()}
        self._entries[key] = tensors
        self.held.add_tensors(tensors.values())

    def take(self, key: ActivationKey) -> dict[str, Tensor]:
        """Return the tensors of ``key``, which then belong to the caller."""
        tensors = self._entries.pop(key)
        self.held.remove_tensors(tensors.values())
        return tensors

    def look_up(self, key: ActivationKey, name: str) -> Tensor | None:
        """Return one saved tensor, which stays in the store; None if it is not saved."""
        return self._entries[key].get(name)

    def release(self, key: ActivationKey) -> None:
        """Do nothing: taken tensors belong to the caller."""

    @property
    def num_entries(self) -> int:
        """Number of keys saved and not yet taken."""
        return len(self._entries)


class LifoArenaStore:
    """:class:`ActivationStore` that is a stack in a :class:`HostArena`.

    Backward takes keys in the reverse order of forward, so a stack pointer suffices to manage the
    memory. Saving copies each tensor once. Long-lived tensors thus stay out of the C heap, which
    they would fragment between short-lived ones: the resident set does not grow, and no pages are
    returned and faulted in again. :meth:`take` returns views of the stack, valid until
    :meth:`release`.

    Args:
        whole: Counter to which the bytes of this store, without alignment, are added.
        poison: Overwrite tensors with NaN when they are released, so that a late reader gets NaN.
    """

    lends_memory = True

    def __init__(self, whole: HeldBytes | None = None, *, poison: bool = False) -> None:
        self._poison = poison
        self._lent: dict[ActivationKey, dict[str, Tensor]] = {}
        self._arena: HostArena | None = None
        self._entries: dict[ActivationKey, tuple[int, dict[str, Tensor]]] = {}
        self._top_bytes = 0
        self.held = HeldBytes(whole)

    def reserve(self, capacity_bytes: int) -> None:
        """Reserve ``capacity_bytes``, the sum of the :func:`slot_bytes` of all tensors.

        Raises:
            MemoryError: The machine lacks memory.
        """
        assert not self._entries, "a stack in use stays where it is"
        if capacity_bytes == 0 or (
            self._arena is not None and capacity_bytes <= self._arena.size_bytes
        ):
            return
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        self._arena = HostArena(capacity_bytes)

    def save(self, key: ActivationKey, tensors: dict[str, Tensor]) -> None:
        """Copy ``tensors`` onto the stack."""
        assert key not in self._entries, f"{key} is saved already"
        start = self._top_bytes
        slots = {}
        for name, tensor in tensors.items():
            assert self._arena is not None, "reserve() comes before save()"
            slots[name] = self._arena.tensor(self._top_bytes, tuple(tensor.shape), tensor.dtype)
            slots[name].copy_(tensor)
            self._top_bytes += slot_bytes(tensor.shape, tensor.element_size())
        self._entries[key] = (start, slots)
        self.held.add_tensors(slots.values())

    def take(self, key: ActivationKey) -> dict[str, Tensor]:
        """Return views of the tensors of ``key``, which must be the last key saved."""
        assert self._entries, f"{key} is taken from an empty stack"
        saved, (start, slots) = self._entries.popitem()
        assert saved == key, f"{key} is taken before {saved}, which was saved later"
        self._top_bytes = start
        self.held.remove_tensors(slots.values())
        if self._poison:
            self._lent[key] = dict(slots)
        return slots

    def look_up(self, key: ActivationKey, name: str) -> Tensor | None:
        """Return a view of one saved tensor, which stays on the stack; None if it is not saved."""
        return self._entries[key][1].get(name)

    def release(self, key: ActivationKey) -> None:
        """Allow the next save to overwrite taken tensors; with ``poison``, overwrite them now."""
        for tensor in self._lent.pop(key, {}).values():
            tensor.fill_(float("nan"))

    @property
    def num_entries(self) -> int:
        """Number of keys saved and not yet taken."""
        return len(self._entries)


def slot_bytes(shape: Sequence[int], element_bytes: int) -> int:
    """Return the bytes of a tensor on the stack: its size, rounded up to the alignment."""
    return -(-prod(shape) * element_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def on_its_own(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a copy if it is a view that keeps a larger storage alive."""
    size = tensor.numel() * tensor.element_size()
    return tensor if tensor.untyped_storage().nbytes() == size else tensor.clone()
