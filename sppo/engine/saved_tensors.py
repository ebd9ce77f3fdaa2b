"""Store of the tensors that layers save: offloads their first rows and retains the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from sppo.activations.activation_layout import ActivationKey
from sppo.model.layer import Saved, token_dimension
from sppo.offload.block_store import BlockStore
from sppo.offload.device_stores import ActivationStore


@dataclass(frozen=True, slots=True)
class SavedTensors:
    """Divides saved tensors by rows between a store on the device and an offload store.

    Attributes:
        retained: Store of the rows that stay on the device.
        offloaded: Store of the rows that leave the device; None if none leave.
    """

    retained: ActivationStore
    offloaded: BlockStore | None

    def save(
        self,
        key: ActivationKey,
        saved: Saved,
        *,
        offloaded_rows: Mapping[str, int],
        retained_rows: Mapping[str, int],
    ) -> None:
        """Save the given numbers of rows of the tensors of ``saved`` and remove them from it."""
        offloaded, retained = cut(saved, offloaded_rows, retained_rows)
        self.retained.save(key, retained)
        if self.offloaded is not None:
            self.offloaded.put(key, offloaded)

    def take(self, key: ActivationKey) -> Saved:
        """Return the tensors saved under ``key``, valid until :meth:`release`."""
        offloaded = {} if self.offloaded is None else self.offloaded.get(key)
        return join(offloaded, self.retained.take(key))

    def take_owned(self, key: ActivationKey) -> Saved:
        """Return the tensors saved under ``key``, copied unless the caller may keep them."""
        offloaded = {} if self.offloaded is None else _copied(self.offloaded.get(key))
        retained = self.retained.take(key)
        return join(offloaded, _copied(retained) if self.retained.lends_memory else retained)

    def release(self, key: ActivationKey) -> None:
        """Allow reuse of the memory taken under ``key``, after compute has read the tensors."""
        self.retained.release(key)
        if self.offloaded is not None:
            self.offloaded.free(key)

    @property
    def num_entries(self) -> int:
        """Number of keys saved and not yet taken, in both stores."""
        away = 0 if self.offloaded is None else self.offloaded.num_entries
        return self.retained.num_entries + away


def cut(
    saved: Saved, offloaded_rows: Mapping[str, int], retained_rows: Mapping[str, int]
) -> tuple[Saved, Saved]:
    """Remove the named tensors from ``saved``; return views of (offloaded, retained) rows."""
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
    """Return the saved rows of tensors that :func:`cut` divided, each as one tensor again."""
    joined = {**offloaded, **retained}
    for name in offloaded.keys() & retained.keys():
        joined[name] = torch.cat([offloaded[name], retained[name]], dim=token_dimension(name))
    return joined


def _copied(tensors: Saved) -> Saved:
    return {name: tensor.clone() for name, tensor in tensors.items()}
