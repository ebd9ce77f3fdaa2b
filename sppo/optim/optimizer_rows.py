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
from sppo.offload.state_memory import StateMemory
from sppo.optim.fused_adamw import MOMENTS
from sppo.parallel.flat_row import FlatRow, Shapes

MASTER_DTYPE = torch.float32


class OptimizerRows:
    """Masters and moments of parameters, zero at first.

    Args:
        shapes: Shapes of the parameters, or of the intervals that this rank updates, by global
            name.
        memory: Allocator of the rows; None for host memory that is not page-locked.

    Raises:
        MemoryError: The host lacks memory.
        OSError: The disk lacks space.
    """

    def __init__(self, shapes: Shapes, *, memory: StateMemory | None = None) -> None:
        self.layout, self._memory = FlatRow(shapes), memory or StateMemory()
        shape = (self.layout.elements,)
        rows = self._memory.tensors(dict.fromkeys(("masters", *MOMENTS), shape), MASTER_DTYPE)
        self.masters, *self.moments = rows.values()

    @property
    def size_bytes(self) -> int:
        """Bytes of masters and moments."""
        return sum(row.nbytes for row in (self.masters, *self.moments))

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
        self._memory.drop_pages()
