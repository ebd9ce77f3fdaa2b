"""What layers save of a unit: one part stays on the device, another leaves it and comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sppo.engine.saved_rows import TensorRows, cut, join
from sppo.model.layer import Saved
from sppo.offload.moving_store import MovingStore
from sppo.offload.store import ActivationKey, ActivationStore


@dataclass(frozen=True, slots=True)
class SavedTensors:
    """Two stores as one.

    Attributes:
        kept: Where tensors wait that stay on the device.
        moved: Where those wait that leave it; None where none does.
    """

    kept: ActivationStore
    moved: MovingStore | None

    def save(self, key: ActivationKey, saved: Saved, rows: Mapping[str, TensorRows]) -> None:
        """Take over ``saved``, by rows."""
        moved, kept = cut(saved, rows)
        self.kept.save(key, kept)
        if self.moved is not None:
            self.moved.save(key, moved)

    def take(self, key: ActivationKey) -> Saved:
        """Return what was saved under ``key``, good until :meth:`release`."""
        moved = {} if self.moved is None else self.moved.take(key)
        return join(moved, self.kept.take(key))

    def take_owned(self, key: ActivationKey) -> Saved:
        """Return what was saved under ``key`` in memory of its own, which outlives the stores'."""
        moved = {} if self.moved is None else _copied(self.moved.take(key))
        kept = self.kept.take(key)
        return join(moved, _copied(kept) if self.kept.lends_memory else kept)

    def release(self, key: ActivationKey) -> None:
        """Compute has read what :meth:`take` gave."""
        self.kept.release(key)
        if self.moved is not None:
            self.moved.release(key)


def _copied(tensors: Saved) -> Saved:
    return {name: tensor.clone() for name, tensor in tensors.items()}
