"""Parameters of whole flat rows by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from sppo.parallel.flat_row import FlatRow

Rows = Mapping[str, Tensor]
"""Rows by key on the device, or the rows that are streamed to it."""


class RowViews(Mapping[str, Tensor]):
    """Mapping of global names to parameters, as views of whole rows.

    Args:
        rows: Whole rows.
        layouts: Layouts of the rows by key.
    """

    def __init__(self, rows: Rows, layouts: Mapping[str, FlatRow]) -> None:
        self.rows, self._layouts = rows, layouts
        self._keys = {name: key for key, layout in layouts.items() for name in layout.shapes}

    def __getitem__(self, name: str) -> Tensor:
        """Return a parameter; compute issued from now on waits for a streamed row."""
        key = self._keys[name]
        return self._layouts[key].view(self.rows[key], name)

    def __iter__(self) -> Iterator[str]:
        """Iterate over all names."""
        return iter(self._keys)

    def __len__(self) -> int:
        """Return the number of all names."""
        return len(self._keys)
