"""Layout of parameters that are sharded by rows in one message, with equal sizes for all ranks.

A message of R ranks is a tensor ``[R, N]``: row r has rank r's rows of every parameter,
concatenated. Where ranks have unequal numbers of rows, the shorter ones are padded at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of whole parameters by global name."""


def rows_of(num_rows: int, *, index: int, count: int) -> slice:
    """Return the rows of rank ``index`` of ``count`` ranks, with shards as equal as possible."""
    return slice(num_rows * index // count, num_rows * (index + 1) // count)


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Position of one parameter's rows, or of a range of them, in each rank's part of a message.

    Attributes:
        name: Global name of the parameter.
        shape: Shape of the whole parameter.
        ranks: Number of ranks over which the rows are sharded.
        begin: First row of the range, counted from each rank's first row.
        end: Row behind the range; the last may be padding.
        offset: Offset of the range in a rank's part, in elements.
    """

    name: str
    shape: tuple[int, ...]
    ranks: int
    begin: int
    end: int
    offset: int

    @property
    def elements(self) -> int:
        """Number of elements of each rank, padding included."""
        return (self.end - self.begin) * prod(self.shape[1:])

    @property
    def is_padded(self) -> bool:
        """True if some rank may have fewer rows than others."""
        return self.shape[0] % self.ranks > 0

    def rows(self, rank: int) -> slice:
        """Return the rows of the parameter that are in the part of ``rank``."""
        own = rows_of(self.shape[0], index=rank, count=self.ranks)
        return slice(min(own.start + self.begin, own.stop), min(own.start + self.end, own.stop))

    def own(self, part_N: Tensor, rank: int) -> Tensor:
        """Return the rows in the part of ``rank``, without padding, as a view."""
        rows = self.rows(rank)
        count, row_shape = rows.stop - rows.start, self.shape[1:]
        own = part_N[self.offset : self.offset + count * prod(row_shape)]
        return own.view(count, *row_shape)

    def pairs(self, flat_RN: Tensor, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of the same rows of all ranks: of a message, and of the parameter."""
        if self.is_padded:
            for rank in range(self.ranks):
                yield self.own(flat_RN[rank], rank), whole[self.rows(rank)]
            return
        sent = flat_RN[:, self.offset : self.offset + self.elements]
        of_ranks = whole.view(self.ranks, self.shape[0] // self.ranks, *self.shape[1:])
        rows = of_ranks[:, self.begin : self.end]
        yield sent.view(rows.shape), rows


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Layout of one message: its parts, and the number of elements of each rank."""

    parts: tuple[PaddedRows, ...]
    elements: int

    @classmethod
    def of(cls, shapes: Shapes, *, ranks: int) -> RowLayout:
        """Return the layout of a message with all rows of the parameters, in their order.

        Args:
            shapes: Shapes of whole parameters by name.
            ranks: Number of ranks over which each parameter is sharded.
        """
        parts: list[PaddedRows] = []
        elements = 0
        for name, shape in shapes.items():
            parts.append(PaddedRows(name, shape, ranks, 0, -(-shape[0] // ranks), elements))
            elements += parts[-1].elements
        return cls(tuple(parts), elements)

    def cut(self, most_elements: int) -> Iterator[RowLayout]:
        """Yield the layouts of several messages that together have the same rows, in their order.

        Args:
            most_elements: Most elements of each rank; a message has at least one row.
        """
        parts: list[PaddedRows] = []
        elements = 0
        for part in self.parts:
            step = max(1, most_elements // max(1, prod(part.shape[1:])))
            for begin in range(part.begin, part.end, step):
                end = min(begin + step, part.end)
                piece = PaddedRows(part.name, part.shape, part.ranks, begin, end, elements)
                if parts and elements + piece.elements > most_elements:
                    yield RowLayout(tuple(parts), elements)
                    parts, elements, piece = [], 0, replace(piece, offset=0)
                parts.append(piece)
                elements += piece.elements
        if parts:
            yield RowLayout(tuple(parts), elements)
