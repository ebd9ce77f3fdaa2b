"""Saved activations of a CPU run in one mapping of exactly their size, last in, first out.

Forward saves layer after layer, unit after unit; backward takes them in the opposite order, so a
stack pointer is all the bookkeeping there is. Copying a tensor in costs a pass over it. It keeps
what lives long out of the C heap, where temporaries come and go between it: freed space is used
again instead of growing the resident set, and no page is returned to the system only to be asked
for again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from torch import Tensor

from sppo.activations.activation_layout import ActivationKey
from sppo.offload.arena import ALIGNMENT_BYTES, HostArena


class LifoArenaStore:
    """:class:`sppo.offload.store.ActivationStore` over a :class:`HostArena`.

    What :meth:`take` returns are views of the stack, good until :meth:`release`.

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
        """See :class:`sppo.offload.store.ActivationStore`."""
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
        """See :class:`sppo.offload.store.ActivationStore`; the last key saved comes first."""
        assert self._entries, f"{key} is taken from an empty stack"
        saved, (start, slots) = self._entries.popitem()
        assert saved == key, f"{key} is taken before {saved}, which was saved later"
        self._top_bytes = start
        self._held_bytes -= _total_bytes(slots)
        if self._poison:
            self._lent[key] = dict(slots)
        return slots

    def release(self, key: ActivationKey) -> None:
        """See :class:`sppo.offload.store.ActivationStore`; the next save writes over it."""
        for tensor in self._lent.pop(key, {}).values():
            tensor.fill_(float("nan"))

    def abort(self) -> None:
        """See :class:`sppo.offload.store.ActivationStore`."""
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


def _total_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())
