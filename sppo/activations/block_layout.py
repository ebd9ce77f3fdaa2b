"""What one layer of one subsequence offloads, packed as one block: its tensors and bytes.

The offloaded rows of a layer's tensors travel together, packed one behind the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sppo.activations.placement import CLASSES
from sppo.activations.policy import RESIDUAL, tensor_bytes_per_token, tensors_of
from sppo.activations.subsequence_placement import Rows
from sppo.config.model import ModelConfig

TENSOR_ALIGNMENT_BYTES = 64
"""Tensors begin at multiples of it, as the kernels like them."""
BLOCK_ALIGNMENT_BYTES = 4096
"""Blocks begin at and fill multiples of it: what a disk reads and writes past the page cache."""
PREFETCH_LAYERS = 2
"""Layers whose blocks may be under way back ahead of the one in use. 1 + ceil(t_H2D / t_backward)
is 2 wherever a block comes back within a layer's backward; where copies are slower, the layers in
between are what the whole step waits for, and more room would only move the wait."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The blocks of one stage's layers, as functions of the rows that are offloaded.

    Attributes:
        model: Whose tensors they carry.
        element_bytes: Of the compute dtype.
        layers: Of the stage.
        input_every: Layers that share one saved input.
        shared_by: Devices that share the rows of a subsequence.
    """

    model: ModelConfig
    element_bytes: int
    layers: range
    input_every: int = 1
    shared_by: int = 1

    def has_own_input(self, layer: int, *, attention_saved: bool) -> bool:
        """Whether a layer saves its input.

        Without its attention output no layer can recompute the input of the one above.
        """
        return (layer - self.layers.start) % self.input_every == 0 or not attention_saved

    def tensor_rows(
        self, rows: Rows, *, own_input: bool, residual: Rows | None = None
    ) -> dict[str, int]:
        """Rows of each tensor, by name, without the tensors that have none.

        Args:
            rows: of each class.
            own_input: whether x_in is among them.
            residual: of those of the residual stream, where they have others.
        """
        found = {}
        for index in range(len(CLASSES)):
            for name in sorted(tensors_of((index,), self.model)):
                of_tensor = rows if residual is None or name not in RESIDUAL else residual
                if of_tensor[index] and (own_input or name != "x_in"):
                    found[name] = of_tensor[index]
        return found

    def tensor_bytes(
        self, rows: Rows, *, own_input: bool, residual: Rows | None = None
    ) -> dict[str, int]:
        """Bytes of the same tensors on one device."""
        sizes = tensor_bytes_per_token(self.model, element_bytes=self.element_bytes)
        found = self.tensor_rows(rows, own_input=own_input, residual=residual)
        return {name: -(-count * sizes[name] // self.shared_by) for name, count in found.items()}

    def blocks(
        self, rows: Rows, *, attention_saved: bool, residual: Rows | None = None
    ) -> tuple[int, ...]:
        """Bytes of each layer's block; see :meth:`tensor_rows`."""
        sizes = {
            own: packed_bytes(self.tensor_bytes(rows, own_input=own, residual=residual).values())
            for own in (False, True)
        }
        return tuple(
            sizes[self.has_own_input(layer, attention_saved=attention_saved)]
            for layer in self.layers
        )

    @property
    def most_padding_bytes(self) -> int:
        """What alignment adds to a block at most."""
        tensors = len(tensor_bytes_per_token(self.model, element_bytes=1))
        return tensors * (TENSOR_ALIGNMENT_BYTES - 1) + BLOCK_ALIGNMENT_BYTES - 1

    def taken_at_once(self, *, attention_saved: bool) -> int:
        """Layers that backward takes together at most: those that share a saved input."""
        return min(self.input_every, len(self.layers)) if attention_saved else 1

    @property
    def ring_slots(self) -> int:
        """Blocks on their way back, or in use."""
        return PREFETCH_LAYERS + self.taken_at_once(attention_saved=True)

    @property
    def staging_slots(self) -> int:
        """Blocks on their way to a disk: a subsequence's, which drain while the next computes."""
        return max(2, len(self.layers))


def packed_offsets(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Where each tensor begins in a block, in the order given, and the size of the block."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += aligned_bytes(size)
    return offsets, aligned_bytes(end, BLOCK_ALIGNMENT_BYTES)


def packed_bytes(sizes: Iterable[int]) -> int:
    """Size of a block of tensors of these sizes."""
    return aligned_bytes(sum(map(aligned_bytes, sizes)), BLOCK_ALIGNMENT_BYTES)


def aligned_bytes(size: int, alignment: int = TENSOR_ALIGNMENT_BYTES) -> int:
    """``size`` up to the next aligned offset."""
    return -(-size // alignment) * alignment
