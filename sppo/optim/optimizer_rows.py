"""Optimizer state in host memory or on a disk: masters and both moments, each one long fp32 row.

The rows are allocated before the weights are made, so each master is written in place, and startup
needs memory only for the rows and the parameters being made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from sppo.cost.parameters import is_decayed
from sppo.offload.arena import HostArena
from sppo.offload.state_memory import StateMemory
from sppo.optim.fused_adamw import MOMENTS

MASTER_DTYPE = torch.float32


class RowPart(NamedTuple):
    """Elements of one parameter in a range of a row."""

    name: str
    elements: slice
    """Place in the flattened parameter."""
    within_range: slice
    """Place in the range."""


class OptimizerRows:
    """Masters and moments of parameters, zero at first, with decayed parameters first.

    Args:
        shapes: Shapes of the parameters by global name.
        memory: Allocator of the rows in a tier; None for host memory.

    Raises:
        MemoryError: The host lacks memory.
        OSError: The disk lacks space.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], *, memory: StateMemory | None = None
    ) -> None:
        self.shapes, self._memory = dict(shapes), memory
        self.begins, elements = _places(shapes)
        """Index of the first element of each parameter in a row, by name, in order of the row."""
        rows = _rows(elements) if memory is None else _rows_in(memory, elements)
        self.masters, *self.moments = rows

    @property
    def size_bytes(self) -> int:
        """Bytes of masters and moments."""
        return sum(row.numel() * row.element_size() for row in (self.masters, *self.moments))

    @property
    def decayed_elements(self) -> int:
        """Number of elements of the decayed parameters, which come first in a row."""
        return sum(prod(shape) for shape in self.shapes.values() if is_decayed(shape))

    def parts(self, begin: int, end: int) -> Iterator[RowPart]:
        """Yield what elements ``[begin, end)`` of a row hold of each parameter, in order."""
        for name, place in self.begins.items():
            first, last = max(begin, place), min(end, place + prod(self.shapes[name]))
            if first < last:
                in_parameter, in_range = (slice(first - at, last - at) for at in (place, begin))
                yield RowPart(name, in_parameter, in_range)

    def view(self, row: Tensor, name: str) -> Tensor:
        """Return one parameter's part of a row, as a view in the parameter's shape."""
        begin, shape = self.begins[name], self.shapes[name]
        return row[begin : begin + prod(shape)].view(shape)

    def views(self, row: Tensor) -> dict[str, Tensor]:
        """Return the :meth:`view` of every parameter in a row, by name."""
        return {name: self.view(row, name) for name in self.shapes}

    def fill(self, masters: Mapping[str, Tensor]) -> None:
        """Copy masters of parameters, by global name, into the row of masters."""
        for name, master in masters.items():
            self.view(self.masters, name).copy_(master)
            self.drop_pages()

    def drop_pages(self) -> None:
        """Allow the tier to drop cached pages: the rows are not used for a while."""
        if self._memory is not None:
            self._memory.drop_pages()


def _places(shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, int], int]:
    """Return the first element of each parameter in a row, in order, and the row's length."""
    begins: dict[str, int] = {}
    end = 0
    for name in sorted(shapes, key=lambda name: not is_decayed(shapes[name])):
        begins[name] = end
        end += prod(shapes[name])
    return begins, end


def _rows(elements: int) -> list[Tensor]:
    """Return rows of zeros for masters and both moments in host memory of exactly their size."""
    count = 1 + len(MOMENTS)
    size_bytes = count * elements * MASTER_DTYPE.itemsize
    memory = HostArena(size_bytes).tensor(0, (count, elements), MASTER_DTYPE)
    return list(memory.unbind())


def _rows_in(memory: StateMemory, elements: int) -> list[Tensor]:
    """Return rows of zeros for masters and both moments in a tier."""
    names = ("masters", *MOMENTS)
    return [*memory.tensors(dict.fromkeys(names, (elements,)), MASTER_DTYPE).values()]
