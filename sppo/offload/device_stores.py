"""Where saved activations wait on the device between forward and backward.

The engine saves named tensors under a key and takes them back once. Which names are saved is the
policy's business, where they lie is the store's: torch's own memory, or, on a CPU whose units come
back last in, first out, one mapping of exactly their size. :mod:`sppo.offload.offload_store` sends
others to another tier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Protocol

from torch import Tensor

from sppo.activations.activation_layout import ActivationKey
from sppo.offload.arena import ALIGNMENT_BYTES, HostArena


class ActivationStore(Protocol):
    """Keeps the tensors a layer saves; every key is saved once and taken once."""

    peak_bytes: int
    """Most bytes held on the device at once."""

    @property
    def lends_memory(self) -> bool:
        """True if :meth:`take` lends memory that is used again after :meth:`release`.

        Otherwise what it returns belongs to the caller.
        """
        ...

    def reserve(self, capacity_bytes: int) -> None:
        """Nothing is held, and up to ``capacity_bytes`` will be: make room."""
        ...

    def save(self, key: ActivationKey, tensors: dict[str, Tensor]) -> None:
        """Take over ``tensors``; the caller keeps no other reference.

        Those that are part of a larger one must not keep all of it.
        """
        ...

    def take(self, key: ActivationKey) -> dict[str, Tensor]:
        """The saved tensors, on the device, bit for bit, good until :meth:`release`."""
        ...

    def release(self, key: ActivationKey) -> None:
        """Compute has read what :meth:`take` gave: its memory may hold something else."""
        ...

    def abort(self) -> None:
        """Forget everything: the step failed. Nothing is read or written any more afterwards."""
        ...

    @property
    def device_bytes(self) -> int:
        """Bytes held on the device now."""
        ...

    @property
    def num_entries(self) -> int:
        """Keys saved and not yet taken, or not yet released where that matters."""
        ...


class DeviceStore:
    """Keeps every saved tensor where it is, in memory of the device's own allocator."""

    lends_memory = False

    def __init__(self) -> None:
        self._entries: dict[ActivationKey, dict[str, Tensor]] = {}
        self._bytes = 0
        self.peak_bytes = 0
        """Most bytes ever held at once."""

    def reserve(self, capacity_bytes: int) -> None:
        """Nothing to do: tensors bring their memory along."""

    def save(self, key: ActivationKey, tensors: dict[str, Tensor]) -> None:
        """See :class:`ActivationStore`."""
        assert key not in self._entries, f"{key} is saved already"
        tensors = {name: _on_its_own(tensor) for name, tensor in tensors.items()}
        self._entries[key] = tensors
        self._bytes += _total_bytes(tensors)
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    def take(self, key: ActivationKey) -> dict[str, Tensor]:
        """See :class:`ActivationStore`."""
        tensors = self._entries.pop(key)
        self._bytes -= _total_bytes(tensors)
        return tensors

    def release(self, key: ActivationKey) -> None:
        """Nothing to do: tensors take their memory along."""

    def abort(self) -> None:
        """See :class:`ActivationStore`."""
        self._entries.clear()
        self._bytes = 0

    @property
    def device_bytes(self) -> int:
        """Bytes held now."""
        return self._bytes

    @property
    def num_entries(self) -> int:
        """Keys saved and not yet taken."""
        return len(self._entries)


class LifoArenaStore:
    """:class:`ActivationStore` over a :class:`HostArena`.

    Forward saves layer after layer, unit after unit; backward takes them in the opposite order, so
    a stack pointer is all the bookkeeping there is. Copying a tensor in costs a pass over it. It
    keeps what lives long out of the C heap, where temporaries come and go between it: freed space
    is used again instead of growing the resident set, and no page is returned only to be asked for
    again. What :meth:`take` returns are views of the stack, good until :meth:`release`.

    Args:
        poison: overwrite tensors with NaN when they are released, so that what reads them later
            reads NaN instead of what was saved next.
    """

    lends_memory = True

    def __init__(self, *, poison: bool = False) -> None:
        self._poison = poison
        self._lent: dict[ActivationKey, dict[str, Tensor]] = {}
        self._arena: HostArena | None = None
        self._entries: dict[ActivationKey, tuple[int, dict[str, Tensor]]] = {}
        self._top_bytes = 0
        self._held_bytes = 0
        self.peak_bytes = 0
        """Most bytes of tensors ever held at once."""

    def reserve(self, capacity_bytes: int) -> None:
        """Make room for ``capacity_bytes`` of tensors, see :func:`slot_bytes`.

        Raises:
            MemoryError: the machine has not that much.
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
        """See :class:`ActivationStore`."""
        assert key not in self._entries, f"{key} is saved already"
        assert self._arena is not None, "reserve() comes before save()"
        start = self._top_bytes
        slots = {}
        for name, tensor in tensors.items():
            slots[name] = self._arena.tensor(self._top_bytes, tuple(tensor.shape), tensor.dtype)
            slots[name].copy_(tensor)
            self._top_bytes += slot_bytes(tensor.shape, tensor.element_size())
        self._entries[key] = (start, slots)
        self._held_bytes += _total_bytes(slots)
        self.peak_bytes = max(self.peak_bytes, self._held_bytes)

    def take(self, key: ActivationKey) -> dict[str, Tensor]:
        """See :class:`ActivationStore`; the last key saved comes first."""
        assert self._entries, f"{key} is taken from an empty stack"
        saved, (start, slots) = self._entries.popitem()
        assert saved == key, f"{key} is taken before {saved}, which was saved later"
        self._top_bytes = start
        self._held_bytes -= _total_bytes(slots)
        if self._poison:
            self._lent[key] = dict(slots)
        return slots

    def release(self, key: ActivationKey) -> None:
        """See :class:`ActivationStore`; the next save writes over it."""
        for tensor in self._lent.pop(key, {}).values():
            tensor.fill_(float("nan"))

    def abort(self) -> None:
        """See :class:`ActivationStore`."""
        self._entries.clear()
        self._lent.clear()
        self._top_bytes = self._held_bytes = 0

    @property
    def device_bytes(self) -> int:
        """Bytes held now."""
        return self._held_bytes

    @property
    def num_entries(self) -> int:
        """Keys saved and not yet taken."""
        return len(self._entries)


def slot_bytes(shape: Sequence[int], element_bytes: int) -> int:
    """Bytes a tensor takes on the stack: its own, up to the next aligned offset."""
    return -(-prod(shape) * element_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _on_its_own(tensor: Tensor) -> Tensor:
    """A copy of what is part of a larger tensor, which would stay for its sake."""
    size = tensor.numel() * tensor.element_size()
    return tensor if tensor.untyped_storage().nbytes() == size else tensor.clone()


def _total_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())
