"""Layout of sharded parameters in one message, with every rank's rows padded to equal sizes.

:func:`sppo.parallel.data_parallel.rows_of` assigns rows to ranks. A message of R ranks is a tensor
``[R, N]``: row r has rank r's rows of every parameter, concatenated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from torch import Tensor

from sppo.parallel.data_parallel import rows_of


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Position of one parameter's rows in each rank's part of a message.

    Attributes:
        name: Global name of the parameter.
        shape: Shape of the whole parameter.
        offset: Offset of the rows in a rank's part, in elements.
        count: Rows of one rank, padding included.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    count: int

    @property
    def row_elements(self) -> int:
        """Number of elements in one row of the parameter."""
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
    """Return the layout of a message, and the number of elements of each rank's part.

    Args:
        names: Names of the parameters, in order.
        shapes: Shapes of whole parameters by name.
        ranks: Number of ranks over which each parameter is sharded.
    """
    parts, offset = [], 0
    for name in names:
        part = PaddedRows(name, shapes[name], offset, -(-shapes[name][0] // ranks))
        parts.append(part)
        offset += part.count * part.row_elements
    return tuple(parts), offset
