"""What layers save of a unit: one part stays on the device, another leaves it and comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sppo.engine.saved_rows import TensorRows, cut, join
from sppo.model.layer import Saved
from sppo.offload.offload_store import OffloadStore
from sppo.offload.store import ActivationKey, ActivationStore


@dataclass(frozen=True, slots=True)
class SavedTensors:
    """Two stores as one.

    Attributes:
        retained: Where tensors wait that stay on the device.
        offloaded: Where those wait that leave it; None where none does.
    """

    retained: ActivationStore
    offloaded: OffloadStore | None

    def save(self, key: ActivationKey, saved: Saved, rows: Mapping[str, TensorRows]) -> None:
        """Take over ``saved``, by rows."""
        offloaded, retained = cut(saved, rows)
        self.retained.save(key, retained)
        if self.offloaded is not None:
            self.offloaded.save(key, offloaded)

    def take(self, key: ActivationKey) -> Saved:
        """Return what was saved under ``key``, good until :meth:`release`."""
        offloaded = {} if self.offloaded is None else self.offloaded.take(key)
        return join(offloaded, self.retained.take(key))

    def take_owned(self, key: ActivationKey) -> Saved:
        """Return what was saved under ``key`` in memory of its own, which outlives the stores'."""
        offloaded = {} if self.offloaded is None else _copied(self.offloaded.take(key))
        retained = self.retained.take(key)
        return join(offloaded, _copied(retained) if self.retained.lends_memory else retained)

    def release(self, key: ActivationKey) -> None:
        """Compute has read what :meth:`take` gave."""
        self.retained.release(key)
        if self.offloaded is not None:
            self.offloaded.release(key)


def _copied(tensors: Saved) -> Saved:
    return {name: tensor.clone() for name, tensor in tensors.items()}
