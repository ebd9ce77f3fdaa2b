"""Flat row: the parameters of a weight part one after another, sharded over ranks by intervals.

A weight part is a layer, or a parameter outside of the layers. The row of a part is padded to equal
intervals of all ranks that hold the same values, and each rank updates its own interval. So a part
is gathered, or its gradients are reduced, by one collective without a copy, and a parameter of the
whole row is a view of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from math import prod
from typing import NamedTuple

from torch import Tensor

from sppo.cost.parameters import is_decayed

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of parameters by global name."""


class RowPart(NamedTuple):
    """Elements of one parameter in an interval of a row."""

    name: str
    elements: slice
    """Place in the flattened parameter."""
    within: slice
    """Place in the interval."""


class FlatRow:
    """Places of parameters in a row, and the intervals of the ranks over which it is sharded.

    Parameters with weight decay come first.

    Args:
        shapes: Shapes of the parameters by global name.
        ranks: Number of ranks that hold the row's parameters.
        rank: Index of this rank among them.
    """

    def __init__(self, shapes: Shapes, *, ranks: int = 1, rank: int = 0) -> None:
        self.shapes = {n: shapes[n] for n in sorted(shapes, key=lambda name: not is_decayed(name))}
        self.ranks, self.rank = ranks, rank
        ends = [*accumulate(map(prod, self.shapes.values()), initial=0)]
        self._begins = dict(zip(self.shapes, ends, strict=False))
        self.elements = ends[-1]
        """Number of elements of all parameters."""
        self.shard_elements = -(-self.elements // ranks)
        """Number of elements of each rank's interval; that of the last ranks may have padding."""

    @property
    def padded_elements(self) -> int:
        """Number of elements of the row with the padding at its end."""
        return self.ranks * self.shard_elements

    @property
    def own(self) -> slice:
        """Interval of this rank."""
        return slice(self.rank * self.shard_elements, (self.rank + 1) * self.shard_elements)

    def kept(self, row: Tensor) -> slice:
        """Return the interval of the whole row that ``row`` is: all of it, or that of this rank."""
        return slice(0, row.numel()) if row.numel() == self.padded_elements else self.own

    def within(self, row: Tensor, interval: slice) -> Tensor:
        """Return an interval of the whole row, of which ``row`` is all, or that of this rank."""
        begin = self.kept(row).start
        return row[interval.start - begin : interval.stop - begin]

    def part(self, name: str, interval: slice) -> RowPart | None:
        """Return what an interval has of a parameter; None if nothing."""
        place = self._begins[name]
        first = max(interval.start, place)
        last = min(interval.stop, place + prod(self.shapes[name]))
        if first >= last:
            return None
        elements, within = (slice(first - at, last - at) for at in (place, interval.start))
        return RowPart(name, elements, within)

    def parts(self, interval: slice) -> Iterator[RowPart]:
        """Yield what an interval has of each parameter, in order, without padding."""
        yield from filter(None, (self.part(name, interval) for name in self.shapes))

    def view(self, row: Tensor, name: str) -> Tensor:
        """Return a parameter as a view of the whole row."""
        begin, shape = self._begins[name], self.shapes[name]
        return row[begin : begin + prod(shape)].view(shape)

    def views(self, row: Tensor) -> dict[str, Tensor]:
        """Return the :meth:`view` of every parameter, by name."""
        return {name: self.view(row, name) for name in self.shapes}
