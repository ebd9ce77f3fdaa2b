"""Checksums of offloaded tensors, for debugging: finds tensors that were altered meanwhile."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from sppo.activations.activation_layout import ActivationKey


class CorruptActivationError(RuntimeError):
    """An offloaded tensor was altered before it returned."""


POISON = 0xFF
"""Byte to fill released memory with: NaN in every floating dtype."""


class Checksums:
    """CRC-32 of every offloaded tensor, over its step, key and name, and its bytes."""

    def __init__(self) -> None:
        self._step = 0
        self._sums: dict[ActivationKey, tuple[int, dict[str, int]]] = {}

    def begin_step(self) -> None:
        """Count a step."""
        self._step += 1

    def note(self, key: ActivationKey, tensors: Mapping[str, Tensor]) -> None:
        """Record the checksums of tensors that are offloaded under ``key``."""
        tag = (self._step, *key)
        sums = {name: checksum(tensor, tag=(*tag, name)) for name, tensor in tensors.items()}
        self._sums[key] = self._step, sums

    def check(self, key: ActivationKey, tensors: Mapping[str, Tensor]) -> None:
        """Compare returned tensors of ``key`` with their recorded checksums.

        Raises:
            CorruptActivationError: A tensor was altered; the message names the tensor.
        """
        step, sums = self._sums.pop(key)
        for name, tensor in tensors.items():
            found, wanted = checksum(tensor, tag=(step, *key, name)), sums[name]
            if found != wanted:
                raise CorruptActivationError(
                    f"{name} of layer {key.layer}, subsequence {key.subsequence}, sequence "
                    f"{key.sequence}, step {step} came back with checksum {found:08x}, was sent "
                    f"with {wanted:08x}: the memory or the disk behind activations.tier is faulty, "
                    "or an ordering of copies is missing; please report it"
                )

    def overwrite(self, data: Tensor) -> None:
        """Overwrite memory, so that a late reader gets NaN."""
        data.fill_(POISON)


def checksum(tensor: Tensor, *, tag: tuple[int | str, ...]) -> int:
    """Return the CRC-32 of a tensor's bytes and of ``tag``, which identifies the tensor."""
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return zlib.crc32(data.tobytes(), zlib.crc32(repr(tag).encode()))
