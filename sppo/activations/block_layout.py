"""What one layer of one subsequence moves, as one parcel: its bytes, and where it lies in the tier.

The moved rows of a layer's tensors travel together, packed one behind the other. Parcels have
their places in the tier here, before the run, so that nothing is allocated while it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sppo.activations.placement import CLASSES
from sppo.activations.policy import RESIDUAL, tensor_bytes_per_token, tensors_of
from sppo.config.model import ModelConfig

TENSOR_ALIGNMENT_BYTES = 64
"""Tensors begin at multiples of it, as the kernels like them."""
BLOCK_ALIGNMENT_BYTES = 4096
"""Parcels begin at and fill multiples of it: what a disk reads and writes past the page cache."""
PREFETCH_LAYERS = 2
"""Layers whose parcels may be under way back ahead of the one in use. 1 + ceil(t_H2D / t_backward)
is 2 wherever a parcel comes back within a layer's backward; where copies are slower, the layers in
between are what the whole step waits for, and more room would only move the wait."""

Rows = tuple[int, int, int]
"""Of x_in, attention and linear, see :mod:`sppo.activations.policy`."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """What of a parcel's size does not depend on the subsequence.

    Attributes:
        model: Whose tensors it carries.
        element_bytes: Of the compute dtype.
        layers: Of the stage.
        input_every: Layers that share one saved input.
        shared_by: Devices that share the rows of a subsequence.
    """

    model: ModelConfig
    element_bytes: int
    layers: int
    input_every: int = 1
    shared_by: int = 1

    def has_own_input(self, layer: int, *, attention_saved: bool) -> bool:
        """Whether a layer saves its input; counted from the first of the stage.

        Without its attention output no layer can rebuild the input of the one above.
        """
        return layer % self.input_every == 0 or not attention_saved

    def tensor_bytes(
        self, rows: Rows, *, own_input: bool, residual: Rows | None = None
    ) -> dict[str, int]:
        """Bytes of the tensors of which `rows` travel, by name, on one device.

        Args:
            rows: of each class.
            own_input: whether x_in is among them.
            residual: of those of the residual stream, where they have others.
        """
        sizes = tensor_bytes_per_token(self.model, element_bytes=self.element_bytes)
        found = {}
        for index in range(len(CLASSES)):
            for name in sorted(tensors_of((index,), self.model)):
                of_tensor = rows if residual is None or name not in RESIDUAL else residual
                if of_tensor[index] and (own_input or name != "x_in"):
                    found[name] = -(-of_tensor[index] * sizes[name] // self.shared_by)
        return found

    def blocks(
        self, rows: Rows, *, attention_saved: bool, residual: Rows | None = None
    ) -> tuple[int, ...]:
        """Bytes of each layer's parcel; see :meth:`tensor_bytes`."""
        sizes = {
            own: packed_bytes(self.tensor_bytes(rows, own_input=own, residual=residual).values())
            for own in (False, True)
        }
        owns = (
            self.has_own_input(layer, attention_saved=attention_saved)
            for layer in range(self.layers)
        )
        return tuple(sizes[own] for own in owns)

    @property
    def most_padding_bytes(self) -> int:
        """What alignment adds to a parcel at most."""
        tensors = len(tensor_bytes_per_token(self.model, element_bytes=1))
        return tensors * (TENSOR_ALIGNMENT_BYTES - 1) + BLOCK_ALIGNMENT_BYTES - 1

    def taken_at_once(self, *, attention_saved: bool) -> int:
        """Layers that backward takes together at most: those that rebuild one another's input."""
        return min(self.input_every, self.layers) if attention_saved else 1

    @property
    def ring_slots(self) -> int:
        """Parcels on their way back, or in use."""
        return PREFETCH_LAYERS + self.taken_at_once(attention_saved=True)

    @property
    def staging_slots(self) -> int:
        """Parcels on their way to a disk: a subsequence's, which drain while the next computes."""
        return max(2, self.layers)


def packed_offsets(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Where each tensor begins in a parcel, in the order given, and the size of the parcel."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += _up(size, TENSOR_ALIGNMENT_BYTES)
    return offsets, _up(end, BLOCK_ALIGNMENT_BYTES)


def packed_bytes(sizes: Iterable[int]) -> int:
    """Size of a parcel of tensors of these sizes."""
    return _up(sum(_up(size, TENSOR_ALIGNMENT_BYTES) for size in sizes), BLOCK_ALIGNMENT_BYTES)


def block_offsets(blocks: Sequence[int], *, start: int) -> tuple[int, ...]:
    """Where the parcels of consecutive layers begin in the tier, the first at `start`."""
    offsets = [start]
    for size in blocks[:-1]:
        offsets.append(offsets[-1] + size)
    return tuple(offsets)


def _up(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
