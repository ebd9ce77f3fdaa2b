"""Where saved activations wait between forward and backward.

The engine saves named tensors under a key and takes them back once. Which names are saved is the
policy's business, where they live is the store's: the one here leaves them on the device;
:mod:`sppo.offload.offload_store` sends them to another tier.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from sppo.activations.activation_layout import ActivationKey


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


def _on_its_own(tensor: Tensor) -> Tensor:
    """A copy of what is part of a larger tensor, which would stay for its sake."""
    size = tensor.numel() * tensor.element_size()
    return tensor if tensor.untyped_storage().nbytes() == size else tensor.clone()


def _total_bytes(tensors: dict[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())
