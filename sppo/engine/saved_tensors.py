"""What layers save of a unit: the first rows leave the device and come back, the next stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from sppo.activations.activation_layout import ActivationKey
from sppo.model.layer import Saved, token_dimension
from sppo.offload.device_stores import ActivationStore
from sppo.offload.offload_store import OffloadStore


@dataclass(frozen=True, slots=True)
class SavedTensors:
    """Two stores as one.

    Attributes:
        retained: Where tensors wait that stay on the device.
        offloaded: Where those wait that leave it; None where none does.
    """

    retained: ActivationStore
    offloaded: OffloadStore | None

    def save(
        self,
        key: ActivationKey,
        saved: Saved,
        *,
        offloaded_rows: Mapping[str, int],
        retained_rows: Mapping[str, int],
    ) -> None:
        """Take over ``saved``, by rows."""
        offloaded, retained = cut(saved, offloaded_rows, retained_rows)
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

    def abort(self) -> None:
        """Forget everything: the step failed."""
        if self.offloaded is not None:
            self.offloaded.abort()  # first: copies under way may read what the others free
        self.retained.abort()

    @property
    def num_entries(self) -> int:
        """Keys saved and not yet taken, in both stores."""
        away = 0 if self.offloaded is None else self.offloaded.num_entries
        return self.retained.num_entries + away


def cut(
    saved: Saved, offloaded_rows: Mapping[str, int], retained_rows: Mapping[str, int]
) -> tuple[Saved, Saved]:
    """(offloaded, retained) rows of ``saved``, which is emptied; views of its tensors."""
    offloaded: Saved = {}
    retained: Saved = {}
    for name in {**offloaded_rows, **retained_rows}:
        tensor, dim, first = saved.pop(name), token_dimension(name), offloaded_rows.get(name, 0)
        if first:
            offloaded[name] = tensor.narrow(dim, 0, first)
        if name in retained_rows:
            retained[name] = tensor.narrow(dim, first, retained_rows[name])
    return offloaded, retained


def join(offloaded: Saved, retained: Saved) -> Saved:
    """What :func:`cut` cut, as far as it was saved."""
    joined = {**offloaded, **retained}
    for name in offloaded.keys() & retained.keys():
        joined[name] = torch.cat([offloaded[name], retained[name]], dim=token_dimension(name))
    return joined


def _copied(tensors: Saved) -> Saved:
    return {name: tensor.clone() for name, tensor in tensors.items()}
