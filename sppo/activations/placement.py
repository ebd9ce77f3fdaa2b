"""Placement of the saved activations of all stages and subsequences, as tables of rows.

A row is one token of one subsequence; the tensor classes are defined in
:mod:`sppo.activations.tensor_classes`. Policies decide about all stages and subsequences at once
(:mod:`sppo.activations.policy_inputs`); engines follow the placement of each subsequence
(:mod:`sppo.activations.subsequence_placement`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sppo.activations.tensor_classes import ATTENTION, CLASSES, X_IN
from sppo.schedule.costs import Table

Counts = npt.NDArray[np.int64]

ROW_ALIGNMENT = 128
"""Number of rows; a class is cut only at a multiple of it."""


class ActivationPlacement(NamedTuple):
    """Rows of every tensor class of all stages and subsequences, [stages, subsequences, 3] each."""

    retained: Counts
    """Rows that stay on the device."""
    offloaded: Counts
    """Rows that are copied to the next tier and back."""
    recomputed: Counts
    """Rows that backward recomputes."""

    @property
    def tokens(self) -> Counts:
        """Tokens of every subsequence, [subsequences]."""
        tokens: Counts = np.sum([table[0, :, X_IN] for table in self], axis=0)
        return tokens

    def of_stages(self, own: slice | list[int]) -> ActivationPlacement:
        """Return the placement of some stages."""
        return ActivationPlacement(*(table[own] for table in self))

    @property
    def offloads_anything(self) -> bool:
        """True if any row leaves the device."""
        return bool(self.offloaded.any())


def kinds_of_rows(*tables: npt.NDArray[Any]) -> tuple[list[int], list[int]]:
    """Return the first row of each kind, and the kind of each row, of tables [rows, ...].

    Rows of a kind are equal in all tables. Kinds are numbered in the order of their first rows.
    """
    numbers: dict[bytes, int] = {}
    kinds = [
        numbers.setdefault(b"".join(table[row].tobytes() for table in tables), len(numbers))
        for row in range(len(tables[0]))
    ]
    return [kinds.index(kind) for kind in range(len(numbers))], kinds


def saved_bytes(
    rows: Counts, *, recomputed: Counts, row_bytes: Table, shared_input_bytes: Table
) -> Table:
    """Return the bytes of given saved rows of each subsequence, all layers of a stage.

    If attention outputs are recomputed, every layer saves its own input, because a layer without
    its attention output cannot recompute the input of the layer above.

    Args:
        rows: Saved rows of each class, [..., subsequences, 3].
        recomputed: Rows of the same subsequences that backward recomputes, of the same shape.
        row_bytes: Bytes of one row of each class, [..., 3].
        shared_input_bytes: Bytes of one row's layer inputs that are not saved because layers share
            a saved input, [...].

    Returns:
        Bytes, [..., subsequences].
    """
    found: Table = np.zeros(rows.shape[:-1])
    for index in range(len(CLASSES)):
        found += rows[..., index] * row_bytes[..., None, index]
    if shared_input_bytes.any():
        every_layer = recomputed[..., ATTENTION] > 0
        found += rows[..., X_IN] * every_layer * shared_input_bytes[..., None]
    return found


def prefix_rows(
    wanted: Table,
    *,
    rows: Counts,
    row_bytes: Table,
    allow_partial: npt.NDArray[np.bool_] | np.bool_ | bool = True,
) -> Counts:
    """Return the rows that make up at most ``wanted`` bytes, class after class.

    Args:
        wanted: Upper bound of the bytes, [..., subsequences].
        rows: Rows that there are of each class, [..., subsequences, 3].
        row_bytes: Bytes of one row of each class, [..., subsequences, 3].
        allow_partial: Whether the last class may be cut, of all or of each subsequence.

    Returns:
        Rows, [..., subsequences, 3]; none where a row has no bytes.
    """
    rows = rows * (row_bytes > 0)
    whole_bytes = rows * row_bytes
    left = wanted[..., None] - (np.cumsum(whole_bytes, axis=-1) - whole_bytes)
    # With a tolerance, so that a whole class counts as whole in spite of rounding.
    is_whole = left >= whole_bytes * (1 - 1e-12)
    cuts = np.clip(left, 0.0, whole_bytes) / np.maximum(row_bytes * ROW_ALIGNMENT, 1e-300)
    part = np.floor(cuts).astype(np.int64) * ROW_ALIGNMENT
    return np.where(is_whole, rows, part * np.asarray(allow_partial)[..., None])
