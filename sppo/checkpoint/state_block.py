"""Block: one rank's rectangular shard of a tensor of the training state.

The blocks of all ranks with the same name tile the tensor of that name. Data parallelism cuts
intervals of the flattened tensor, tensor parallelism cuts rows or columns, and a pipeline rank has
no blocks of other stages' tensors. Several ranks may hold the same block (replicas), and a block
may have no rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

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


Blocks = Mapping[str, Sequence[StateBlock]]
"""Blocks of one rank by the name of the global tensor."""


def whole(tensor: Tensor) -> StateBlock:
    """Return the block that covers a whole tensor, for a tensor that is not sharded."""
    return StateBlock(tensor, (0,) * tensor.dim(), tuple(tensor.shape))


def blocks_of_interval(
    tensor: Tensor,
    *,
    begin: int,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    global_shape: tuple[int, ...],
) -> list[StateBlock]:
    """Return the blocks that an interval of a flattened tensor fills, as views of ``tensor``.

    Args:
        tensor: Elements of the interval.
        begin: Index of its first element in the flattened tensor.
        shape: Shape of the tensor, which may itself be a block of a global tensor.
        offsets: Index at which that block begins in the global tensor.
        global_shape: Shape of the global tensor.
    """
    flat, end = tensor.reshape(-1), begin + tensor.numel()
    found = []
    for first, sizes in _boxes(shape, begin, end):
        own, flat = flat[: prod(sizes)].view(sizes), flat[prod(sizes) :]
        at = tuple(map(sum, zip(offsets, first, strict=True)))
        found.append(StateBlock(own, at, global_shape))
    return found


def _boxes(
    shape: tuple[int, ...], begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offsets, shape) of the boxes with elements [begin, end) of a tensor, in order."""
    if len(shape) == 1:
        yield (begin,), (end - begin,)
        return
    row = prod(shape[1:])
    while begin < end:
        index, within = divmod(begin, row)
        rows = (end - begin) // row
        if within == 0 and rows:
            yield (index, *[0] * (len(shape) - 1)), (rows, *shape[1:])
            begin += rows * row
            continue
        last = min(end, (index + 1) * row)
        for offsets, sizes in _boxes(shape[1:], within, last - index * row):
            yield (index, *offsets), (1, *sizes)
        begin = last


def as_blocks(
    state: Mapping[str, Tensor | StateBlock | Sequence[StateBlock]],
) -> dict[str, list[StateBlock]]:
    """Return the blocks of each name; a tensor is a block that covers the whole tensor."""
    found = {}
    for name, value in state.items():
        blocks = whole(value) if isinstance(value, Tensor) else value
        found[name] = [blocks] if isinstance(blocks, StateBlock) else [*blocks]
    return found


def copied(state: Blocks) -> Blocks:
    """Return CPU copies of the blocks, so that the caller may change ``state`` meanwhile."""
    return {
        name: [replace(b, tensor=b.tensor.detach().to("cpu", copy=True)) for b in blocks]
        for name, blocks in state.items()
    }
