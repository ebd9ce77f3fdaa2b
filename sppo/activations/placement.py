"""Placement of the saved activations of all stages and subsequences, as tables of rows.

A row is one token of one subsequence; the tensor classes are defined in
:mod:`sppo.activations.tensor_classes`. Policies decide about all stages and subsequences at once
(:mod:`sppo.activations.policy_inputs`); engines follow the placement of each subsequence
(:mod:`sppo.activations.subsequence_placement`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from sppo.activations.tensor_classes import ATTENTION, CLASSES, LINEAR, X_IN
from sppo.schedule.costs import Table

Counts = npt.NDArray[np.int64]

ROW_ALIGNMENT = 128
"""Number of rows; a class is cut only at a multiple of it."""


@dataclass(frozen=True, eq=False)
class ActivationPlacement:
    """Rows of every tensor class of all stages and subsequences, by placement.

    Attributes:
        retained: Rows that stay on the device, [stages, subsequences, 3].
        offloaded: Rows that are copied to the next tier and back, of the same shape.
        recomputed: Rows that backward recomputes, of the same shape.
        known_alike: For each stage, a stage up to it that is known to have the same rows,
            [stages]; () if none is known.
    """

    retained: Counts
    offloaded: Counts
    recomputed: Counts
    known_alike: Sequence[int] = field(default=(), kw_only=True)

    @property
    def tokens(self) -> Counts:
        """Tokens of every subsequence, [subsequences]."""
        tables = (self.retained, self.offloaded, self.recomputed)
        tokens: Counts = np.sum([table[0, :, X_IN] for table in tables], axis=0)
        return tokens

    @cached_property
    def alike(self) -> Sequence[int]:
        """First stage with the same rows, for each stage, [stages]."""
        tables = self.retained, self.offloaded, self.recomputed
        if not self.known_alike:
            return alike_stages(*tables)
        firsts = [*dict.fromkeys(self.known_alike)]
        alike = alike_stages(*(table[firsts] for table in tables))
        first_of = {stage: firsts[place] for stage, place in zip(firsts, alike, strict=True)}
        return [first_of[stage] for stage in self.known_alike]

    def rows_of(self, stage: int) -> bytes:
        """Return the rows of a stage as bytes, which are equal for stages placed alike."""
        tables = self.retained, self.offloaded, self.recomputed
        return b"".join(table[stage].tobytes() for table in tables)

    def of_stages(self, own: slice) -> ActivationPlacement:
        """Return the placement of some stages."""
        return ActivationPlacement(self.retained[own], self.offloaded[own], self.recomputed[own])

    @property
    def offloads_anything(self) -> bool:
        """True if any row leaves the device."""
        return bool(self.offloaded.any())


def alike_stages(*tables: npt.NDArray[Any]) -> list[int]:
    """Return for each stage the first stage with equal rows in all tables, [stages].

    Args:
        tables: Tables of shape [stages, ...].
    """
    first = np.arange(len(tables[0]))
    differs = [(t[1:] != t[:-1]).any(axis=tuple(range(1, t.ndim))) for t in tables]
    first[1:] *= np.any(differs, axis=0)
    of_neighbours: list[int] = np.maximum.accumulate(first).tolist()
    by_rows: dict[tuple[bytes, ...], int] = {}
    found = {
        stage: by_rows.setdefault(tuple(table[stage].tobytes() for table in tables), stage)
        for stage in dict.fromkeys(of_neighbours)
    }
    return [found[stage] for stage in of_neighbours]


def first_of_each(keys: Iterable[Hashable]) -> tuple[list[int], list[int]]:
    """Return the positions at which distinct keys first occur, and the kind of every key.

    Kinds number the distinct keys in the order of their first positions.
    """
    numbers: dict[Hashable, int] = {}
    firsts: list[int] = []
    kinds: list[int] = []
    for position, key in enumerate(keys):
        kind = numbers.setdefault(key, len(numbers))
        if kind == len(firsts):
            firsts.append(position)
        kinds.append(kind)
    return firsts, kinds


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
    x_in, attention, linear = np.moveaxis(row_bytes, -1, 0)[..., None]
    found: Table = rows[..., X_IN] * x_in + rows[..., ATTENTION] * attention
    found += rows[..., LINEAR] * linear
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
        Rows, [..., subsequences, 3].
    """
    found = np.zeros((len(CLASSES), *wanted.shape), dtype=np.int64)
    left = wanted.astype(np.float64)
    for index, taken in enumerate(found):
        size, most = row_bytes[..., index], rows[..., index]
        whole_bytes = most * size
        # With a tolerance, so that a whole class counts as whole in spite of rounding.
        whole = left >= whole_bytes * (1 - 1e-12)
        cuts = np.minimum(left, whole_bytes) / np.maximum(size * ROW_ALIGNMENT, 1e-300)
        taken[...] = np.floor(cuts).astype(np.int64) * ROW_ALIGNMENT * allow_partial
        np.copyto(taken, most, where=whole)
        left = np.maximum(left - whole_bytes, 0.0) * whole
        if not left.any():
            break
    return np.moveaxis(found, 0, -1)
