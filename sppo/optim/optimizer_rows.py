"""Optimizer state in host memory or on a disk: masters and both moments, each one long fp32 row.

The rows are allocated before the weights are made, so each master is written in place, and startup
needs memory only for the rows and the parameters being made.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from sppo.cost.parameters import is_decayed
from sppo.offload.arena import HostArena
from sppo.offload.state_memory import StateMemory
from sppo.optim.fused_adamw import MOMENTS
from sppo.parallel.flat_row import FlatRow, Shapes

MASTER_DTYPE = torch.float32


class OptimizerRows:
    """Masters and moments of parameters, zero at first.

    Args:
        shapes: Shapes of the parameters, or of the intervals that this rank updates, by global
            name.
        memory: Allocator of the rows in a tier; None for host memory.

    Raises:
        MemoryError: The host lacks memory.
        OSError: The disk lacks space.
    """

    def __init__(self, shapes: Shapes, *, memory: StateMemory | None = None) -> None:
        self.layout, self._memory = FlatRow(shapes), memory
        elements = self.layout.elements
        rows = _rows(elements) if memory is None else _rows_in(memory, elements)
        self.masters, *self.moments = rows

    @property
    def size_bytes(self) -> int:
        """Bytes of masters and moments."""
        return sum(row.numel() * row.element_size() for row in (self.masters, *self.moments))

    @property
    def decayed_elements(self) -> int:
        """Number of elements of the decayed parameters, which come first in a row."""
        return sum(prod(shape) for n, shape in self.layout.shapes.items() if is_decayed(n))

    def fill(self, masters: Mapping[str, Tensor]) -> None:
        """Copy masters of parameters, by global name, into the row of masters."""
        for name, master in masters.items():
            self.layout.view(self.masters, name).copy_(master)
            self.drop_pages()

    def drop_pages(self) -> None:
        """Allow the tier to drop cached pages: the rows are not used for a while."""
        if self._memory is not None:
            self._memory.drop_pages()


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
