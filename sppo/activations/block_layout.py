"""Layout of the block of one layer: the offloaded rows of its saved tensors, packed together.

Layers of one stage may differ: those of each type have tensors of their own sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from sppo.activations.placement import Counts
from sppo.activations.subsequence_placement import Rows
from sppo.activations.tensor_classes import (
    CHOSEN,
    RESIDUAL,
    class_of,
    tensor_bytes_per_token,
)
from sppo.config.model import LayerType, ModelConfig

Flags = npt.NDArray[np.bool_]
_Sizes = TypeVar("_Sizes", int, Counts)

TENSOR_ALIGNMENT_BYTES = 64
"""Alignment of the tensors in a block, with which kernels are fastest."""
BLOCK_ALIGNMENT_BYTES = 4096
"""Alignment of block offsets and sizes, required by disk reads that bypass the page cache."""
PREFETCH_LAYERS = 2
"""Number of layers prefetched ahead of the layer in use: 1 + ceil(t_H2D / t_backward), which is 2
if a block comes back within a layer's backward. If copies are slower, the whole step waits, and
prefetching more layers would only move the wait."""


@dataclass(frozen=True)
class BlockLayout:
    """Layout of the blocks of one stage's layers, as functions of the offloaded rows.

    Attributes:
        model: Shape of the model.
        layers: Layers of the stage.
        element_bytes: Bytes of an element of the compute dtype.
        input_every: Number of layers that share one saved input.
        shard_count: Number of devices over which the rows of a subsequence are sharded.
    """

    model: ModelConfig
    layers: range
    element_bytes: int
    input_every: int = 1
    shard_count: int = 1

    def has_own_input(self, layer: int, *, attention_saved: bool) -> bool:
        """Return whether a layer saves its input.

        Every layer does if attention outputs are not saved, because a layer without its attention
        output cannot recompute the input of the layer above.
        """
        return (layer - self.layers.start) % self.input_every == 0 or not attention_saved

    @property
    def kv_layers(self) -> list[int]:
        """Layers of the stage that have K and V."""
        return [layer for layer in self.layers if not self.model.layer_type(layer).linear]

    @cached_property
    def row_bytes(self) -> Mapping[LayerType, Mapping[str, int]]:
        """Bytes of one row of every tensor that a layer of each type may save, by name."""
        types = dict.fromkeys(map(self.model.layer_type, self.layers))
        return {
            own: tensor_bytes_per_token(self.model, own, element_bytes=self.element_bytes)
            for own in types
        }

    def tensor_rows(
        self, layer: int, rows: Rows, *, own_input: bool, residual: Rows | None = None
    ) -> dict[str, int]:
        """Return the rows of each tensor of a layer, by name, without tensors of 0 rows.

        Args:
            layer: Layer of the stage.
            rows: Rows of each class.
            own_input: Whether the layer saves x_in.
            residual: Rows of each class for tensors of the residual stream, if they differ.
        """
        found = {}
        for index, name in self._tensors[self.model.layer_type(layer)]:
            of_tensor = rows if residual is None or name not in RESIDUAL else residual
            if of_tensor[index] and (own_input or name != "x_in"):
                found[name] = of_tensor[index]
        return found

    @cached_property
    def _tensors(self) -> Mapping[LayerType, list[tuple[int, str]]]:
        """Class and name of every tensor of some class, by layer type, in the order of a block."""
        return {
            own: sorted((class_of(name), name) for name in sizes if name != CHOSEN)
            for own, sizes in self.row_bytes.items()
        }

    def blocks(
        self, rows: Counts, *, attention_saved: Flags, residual: Counts | None = None
    ) -> Counts:
        """Return the size of each layer's block of any number of subsequences, [n, layers].

        Args:
            rows: Offloaded rows of each class, [n, 3].
            attention_saved: Whether attention outputs are saved, [n].
            residual: Offloaded rows for tensors of the residual stream, if they differ.
        """
        types = [self.model.layer_type(layer) for layer in self.layers]
        tensors = {
            own: self.layer_bytes(own, rows, residual=residual, alignment=TENSOR_ALIGNMENT_BYTES)
            for own in self.row_bytes
        }
        sizes = np.array([tensors[own] for own in types], dtype=np.int64)
        sizes = sizes.reshape(len(types), 2, len(rows))
        without, with_input = aligned_bytes(sizes, BLOCK_ALIGNMENT_BYTES).transpose(1, 2, 0)
        own_input = np.array(
            [
                [self.has_own_input(layer, attention_saved=saved) for layer in self.layers]
                for saved in (False, True)
            ]
        )
        blocks: Counts = np.where(own_input[attention_saved.astype(np.int64)], with_input, without)
        return blocks

    def layer_bytes(
        self,
        layer_type: LayerType,
        rows: Counts,
        *,
        residual: Counts | None = None,
        alignment: int = 1,
    ) -> Counts:
        """Return the bytes of a layer's tensors on one device, without and with its own input.

        Args:
            layer_type: Type of the layer.
            rows: Rows of each class, of any number of subsequences, [n, 3].
            residual: Rows of each class for tensors of the residual stream, if they differ.
            alignment: Multiple to which the bytes of each tensor are rounded up.

        Returns:
            [2, n].
        """
        sizes = np.zeros((2, len(rows)), dtype=np.int64)
        for index, name in self._tensors[layer_type]:
            of_tensor = rows if residual is None or name not in RESIDUAL else residual
            row_bytes = self.row_bytes[layer_type][name]
            aligned = aligned_bytes(self.sharded_bytes(row_bytes, of_tensor[:, index]), alignment)
            sizes += np.stack([aligned * (name != "x_in"), aligned])
        return sizes

    def sharded_bytes(self, row_bytes: int, rows: Counts) -> Counts:
        """Return the bytes of some rows of a tensor on one device."""
        return -(-rows * row_bytes // self.shard_count)

    @property
    def most_padding_bytes(self) -> int:
        """Upper bound of the bytes that alignment adds to a block."""
        tensors = max(map(len, self.row_bytes.values()), default=0)
        return tensors * (TENSOR_ALIGNMENT_BYTES - 1) + BLOCK_ALIGNMENT_BYTES - 1

    @property
    def taken_at_once(self) -> int:
        """Largest number of layers that backward runs together, sharing an input."""
        return min(self.input_every, len(self.layers))

    @property
    def ring_slots(self) -> int:
        """Number of device slots for the blocks that are prefetched or in use."""
        return PREFETCH_LAYERS + self.taken_at_once

    @property
    def staging_slots(self) -> int:
        """Number of host slots for one subsequence's blocks, written to disk during the next one.

        If K and V are offloaded too, in blocks of their own, this is half of a subsequence's
        blocks.
        """
        return max(2, len(self.layers))


def packed_offsets(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Return the offset of each tensor in a block, in the given order, and the block's size."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += aligned_bytes(size)
    return offsets, aligned_bytes(end, BLOCK_ALIGNMENT_BYTES)


def packed_bytes(sizes: Iterable[int]) -> int:
    """Return the size of a block of tensors with the given sizes."""
    return aligned_bytes(sum(map(aligned_bytes, sizes)), BLOCK_ALIGNMENT_BYTES)


def aligned_bytes(sizes: _Sizes, alignment: int = TENSOR_ALIGNMENT_BYTES) -> _Sizes:
    """Return sizes rounded up to multiples of ``alignment``."""
    return -(-sizes // alignment) * alignment
