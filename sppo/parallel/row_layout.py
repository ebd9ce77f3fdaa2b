"""Layout of sharded parameters in one message: every rank's rows, padded to equal sizes.

Rows are sharded as :func:`sppo.parallel.data_parallel.rows_of` does. A message of R ranks is a
tensor ``[R, N]``: row r has rank r's rows of every parameter, one behind the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from torch import Tensor

from sppo.parallel.data_parallel import rows_of


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Rows of one parameter in what each of several ranks has of a message.

    Attributes:
        name: Of the parameter.
        shape: Of the whole parameter.
        offset: Where they begin, in elements.
        count: Rows of one rank with padding.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    count: int

    @property
    def row_elements(self) -> int:
        """Elements of one row."""
        return prod(self.shape[1:])

    def is_padded(self, ranks: int) -> bool:
        """Return whether some rank has fewer rows than others."""
        return self.shape[0] < ranks * self.count

    def within(self, flat_RN: Tensor) -> Tensor:
        """Return all ranks' rows with padding, ``[R, count * row_elements]``, as a view."""
        return flat_RN[:, self.offset : self.offset + self.count * self.row_elements]

    def own(self, flat_RN: Tensor, rank: int) -> Tensor:
        """Return the rows of one rank without padding, as a view."""
        rows = rows_of(self.shape[0], index=rank, count=flat_RN.shape[0])
        count = rows.stop - rows.start
        own = flat_RN[rank, self.offset : self.offset + count * self.row_elements]
        return own.view(count, *self.shape[1:])


def row_layout(
    names: Iterable[str], shapes: Mapping[str, tuple[int, ...]], *, ranks: int
) -> tuple[tuple[PaddedRows, ...], int]:
    """Return the layout of a message of some parameters, and the elements that each rank has of it.

    Args:
        names: of the parameters, in their order.
        shapes: of whole parameters.
        ranks: over which each is sharded.
    """
    parts, offset = [], 0
    for name in names:
        part = PaddedRows(name, shapes[name], offset, -(-shapes[name][0] // ranks))
        parts.append(part)
        offset += part.count * part.row_elements
    return tuple(parts), offset
