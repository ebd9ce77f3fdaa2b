"""Checksums of moved tensors, for debugging: what comes back must be what was sent."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from sppo.activations.activation_layout import ActivationKey


class CorruptActivationError(RuntimeError):
    """A saved tensor came back as another than it was sent."""


class Tag(NamedTuple):
    """Whose bytes they are."""

    step: int
    sequence: int
    subsequence: int
    layer: int
    tensor: str

    def __str__(self) -> str:
        return (
            f"{self.tensor} of layer {self.layer}, subsequence {self.subsequence}, sequence "
            f"{self.sequence}, step {self.step}"
        )


class Checksums:
    """CRC-32 of every tensor that is away, over its tag and its bytes."""

    def __init__(self) -> None:
        self._sums: dict[ActivationKey, dict[str, tuple[Tag, int]]] = {}

    def note(self, key: ActivationKey, tensors: Mapping[str, Tensor], *, step: int) -> None:
        """Take in what is sent away under ``key``."""
        tags = {name: Tag(step, *key, name) for name in tensors}
        self._sums[key] = {
            name: (tags[name], checksum(tensor, tag=tags[name])) for name, tensor in tensors.items()
        }

    def check(self, key: ActivationKey, tensors: Mapping[str, Tensor]) -> None:
        """Compare what came back under ``key``.

        Raises:
            CorruptActivationError: it is not what was sent; says which tensor.
        """
        expected = self._sums.pop(key)
        for name, tensor in tensors.items():
            tag, wanted = expected[name]
            found = checksum(tensor, tag=tag)
            if found != wanted:
                raise CorruptActivationError(
                    f"{tag} came back with checksum {found:08x}, was sent with {wanted:08x}: the "
                    "memory or the disk behind activations.tier is faulty, or an ordering of "
                    "copies is missing; please report it"
                )

    def clear(self) -> None:
        """Forget everything: the step failed."""
        self._sums.clear()


def checksum(tensor: Tensor, *, tag: Tag) -> int:
    """Of a tensor's bytes under its tag."""
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return zlib.crc32(data.tobytes(), zlib.crc32(repr(tuple(tag)).encode()))
