"""Block: one rank's rectangular shard of a tensor of the training state.

The blocks of all ranks with the same name tile the tensor of that name. Data parallelism cuts rows,
tensor parallelism cuts rows or columns, and a pipeline rank has no blocks of other stages' tensors.
Several ranks may hold the same block (replicas), and a block may have no rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StateBlock:
    """Block of a global tensor: global[offsets[0] : offsets[0] + tensor.shape[0], ...]."""

    tensor: Tensor
    """Contents of the block, on any device; may be a view."""
    offsets: tuple[int, ...]
    """Index at which the block begins in the global tensor; () for a 0-d tensor."""
    global_shape: tuple[int, ...]
    """Shape of the global tensor."""

    def __post_init__(self) -> None:
        shape = tuple(self.tensor.shape)
        assert len(self.offsets) == len(self.global_shape) == len(shape), (
            f"block {shape} at {self.offsets} of {self.global_shape}: dimensions differ"
        )
        assert all(
            offset >= 0 and offset + size <= whole_size
            for offset, size, whole_size in zip(self.offsets, shape, self.global_shape, strict=True)
        ), f"block {shape} at {self.offsets} reaches out of {self.global_shape}"

    @property
    def is_vacant(self) -> bool:
        """True if the block has no elements although its global tensor has."""
        return self.tensor.numel() == 0 and 0 not in self.global_shape


def whole(tensor: Tensor) -> StateBlock:
    """Return the block that covers a whole tensor, for a tensor that is not sharded."""
    return StateBlock(tensor, (0,) * tensor.dim(), tuple(tensor.shape))


def as_blocks(state: Mapping[str, Tensor | StateBlock]) -> dict[str, StateBlock]:
    """Return ``state`` with every tensor wrapped in a block that covers the whole tensor."""
    return {
        name: value if isinstance(value, StateBlock) else whole(value)
        for name, value in state.items()
    }
