"""An optimizer's state behind the device: fp32 masters and both moments, each one long row.

The rows are made before the weights, so each master is written to where it stays, and a start takes
no more than them and the parameters that are being made.
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

WIDE = torch.float32


class OptimizerRows:
    """Masters and moments of some parameters, zero at first; those with weight decay come first.

    Args:
        shapes: by global name.
        memory: where the rows live; None takes host memory.

    Raises:
        MemoryError: the host has not the memory.
        OSError: the disk has not the space.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], *, memory: StateMemory | None = None
    ) -> None:
        self.shapes, self._memory = dict(shapes), memory
        self.begins, elements = _places(shapes)
        """Where parameters begin in a row, elements, in the order of the row."""
        rows = _rows(elements) if memory is None else _rows_in(memory, elements)
        self.masters, *self.moments = rows

    @property
    def size_bytes(self) -> int:
        """Memory of masters and moments."""
        return sum(row.numel() * row.element_size() for row in (self.masters, *self.moments))

    def view(self, row: Tensor, name: str) -> Tensor:
        """Return one parameter's part of a row, in its shape."""
        begin, shape = self.begins[name], self.shapes[name]
        return row[begin : begin + prod(shape)].view(shape)

    def fill(self, masters: Mapping[str, Tensor]) -> None:
        """Copy the masters of some parameters to their places."""
        for name, master in masters.items():
            self.view(self.masters, name).copy_(master)
            self.forget()

    def forget(self) -> None:
        """Note that nobody uses the rows for a while."""
        if self._memory is not None:
            self._memory.forget()


def _places(shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, int], int]:
    """Return where parameters begin in a row, in its order, and where the last one ends."""
    begins: dict[str, int] = {}
    end = 0
    for name in sorted(shapes, key=lambda name: not is_decayed(shapes[name])):
        begins[name] = end
        end += prod(shapes[name])
    return begins, end


def _rows(elements: int) -> list[Tensor]:
    """Masters and both moments: zeros in host memory of exactly that size."""
    count = 1 + len(MOMENTS)
    with HostArena(count * elements * WIDE.itemsize) as arena:  # lives as long as views of it
        memory = arena.tensor(0, (count, elements), WIDE)
    return list(memory.unbind())


def _rows_in(memory: StateMemory, elements: int) -> list[Tensor]:
    """Masters and both moments: zeros in another tier."""
    names = ("masters", *MOMENTS)
    return [*memory.tensors(dict.fromkeys(names, (elements,)), WIDE).values()]
