"""One rank's shard of a tensor of the training state: a rectangular block of it.

Over all ranks the blocks of a name tile its tensor. Data parallelism cuts rows, tensor parallelism
rows or columns, and pipeline ranks leave out the names of other stages. Ranks that hold the same
block are replicas of each other; a rank may hold no row at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StateBlock:
    """``tensor`` is global[offsets[0] : offsets[0] + tensor.shape[0], ...]."""

    tensor: Tensor
    """Contents of the block, on any device; a view will do."""
    offsets: tuple[int, ...]
    """Index at which the block begins in the global tensor; () for a 0-d one."""
    global_shape: tuple[int, ...]

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
        """Return whether the block covers nothing of a tensor that has elements."""
        return self.tensor.numel() == 0 and 0 not in self.global_shape


def whole(tensor: Tensor) -> StateBlock:
    """Return all of a tensor, as a rank holds it where it is not sharded."""
    return StateBlock(tensor, (0,) * tensor.dim(), tuple(tensor.shape))


def as_blocks(state: Mapping[str, Tensor | StateBlock]) -> dict[str, StateBlock]:
    """Return ``state`` with every bare tensor :func:`whole`."""
    return {
        name: value if isinstance(value, StateBlock) else whole(value)
        for name, value in state.items()
    }
