"""Placement of saved activations: which rows are retained, offloaded and recomputed.

A row is one token of one subsequence; the tensor classes are defined in
:mod:`sppo.activations.tensor_classes`. Engines follow the :class:`SubsequencePlacement` of each
subsequence; policies decide about all stages and subsequences at once
(:mod:`sppo.activations.policy_inputs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field

from sppo.activations.tensor_classes import ATTENTION, CLASSES, LINEAR, X_IN
from sppo.schedule.costs import Table

Counts = npt.NDArray[np.int64]

Rows = tuple[int, int, int]
"""Rows, i.e. tokens, of x_in, attention and linear."""
ROW_ALIGNMENT = 128
"""Number of rows; a class is cut only at a multiple of it."""


@dataclass(frozen=True, slots=True)
class SubsequencePlacement:
    """Rows of every tensor class of one subsequence on one stage, by placement.

    A tensor's first rows are offloaded, the next are retained, the last are recomputed.

    Attributes:
        retained: Rows of each class that stay on the device.
        offloaded: Rows of each class that are copied to the next tier and back.
        recomputed: Rows of each class that backward recomputes.
        slot_offset_bytes: Planned offset in the tier of the offloaded rows of all the layers.

    Plan files keep the names that their first version gave the rows: kept, moved, rebuilt.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    retained: Annotated[Rows, Field(alias="kept")]
    offloaded: Annotated[Rows, Field(alias="moved")]
    recomputed: Annotated[Rows, Field(alias="rebuilt")]
    slot_offset_bytes: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens of the subsequence."""
        return self.retained[0] + self.offloaded[0] + self.recomputed[0]

    @property
    def attention_saved(self) -> bool:
        """True if the attention output of every layer is saved for backward."""
        return self.recomputed[ATTENTION] == 0

    def sharded(self, shard_tokens: Sequence[int]) -> tuple[SubsequencePlacement, ...]:
        """Return the placements of shards of the subsequence that have ``shard_tokens`` tokens.

        All shards save the same fraction of their rows, rounded down, so that a class that one
        shard recomputes is recomputed by all.
        """
        tokens = self.tokens
        saved = [m + k for m, k in zip(self.offloaded, self.retained, strict=True)]
        shards = []
        for own in shard_tokens:
            offloaded = _rows(rows * own // tokens for rows in self.offloaded)
            kept = _rows(rows * own // tokens for rows in saved)
            shards.append(
                SubsequencePlacement(
                    retained=_rows(s - m for s, m in zip(kept, offloaded, strict=True)),
                    offloaded=offloaded,
                    recomputed=_rows(own - s for s in kept),
                )
            )
        return tuple(shards)


PlacementOf = Callable[[tuple[int, ...]], tuple[SubsequencePlacement, ...]]
"""Function from the lengths of a sequence's subsequences to their placements on one stage."""


def planned_placement(planned: tuple[SubsequencePlacement, ...]) -> PlacementOf:
    """Return the placements that a plan gives one stage, for sequences cut as in the plan."""

    def placement_of(lengths: tuple[int, ...]) -> tuple[SubsequencePlacement, ...]:
        found = tuple(placement.tokens for placement in planned)
        assert found == lengths, f"the plan is for subsequences of {found}, not {lengths} tokens"
        return planned

    return placement_of


def check_whole_classes(placements: Iterable[SubsequencePlacement]) -> None:
    """Raise ValueError if a class is recomputed in part, unsupported with sharded weights.

    Raises:
        ValueError: A class that is recomputed in part.
    """
    for number, placement in enumerate(placements):
        for index, name in enumerate(CLASSES):
            saved = placement.retained[index] + placement.offloaded[index]
            if saved and placement.recomputed[index]:
                raise ValueError(
                    f"the plan recomputes {placement.recomputed[index]} of "
                    f"{saved + placement.recomputed[index]} rows of {name} of subsequence {number},"
                    " and with parallel.sequence_parallel=megatron tensors are recomputed whole or "
                    "not at all: solve again, or write parallel.sequence_parallel=ulysses"
                )


def _rows(counts: Iterable[int]) -> Rows:
    x_in, attention, linear = counts
    return x_in, attention, linear


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
    wanted: Table, *, tokens: Counts, row_bytes: Table, allow_partial: bool = True
) -> Counts:
    """Return the rows that make up at most ``wanted`` bytes, class after class.

    Args:
        wanted: Upper bound of the bytes, [..., subsequences].
        tokens: Tokens of every subsequence, [subsequences].
        row_bytes: Bytes of one row of each class, [..., 3].
        allow_partial: Whether the last class may be cut.

    Returns:
        Rows, [..., subsequences, 3].
    """
    by_class = np.zeros((len(CLASSES), *wanted.shape), dtype=np.int64)
    left = wanted.astype(np.float64)
    for index, rows in enumerate(by_class):
        size = np.maximum(row_bytes[..., index], 1e-300)[..., None]
        whole_bytes = tokens * size
        # With a tolerance, so that a whole class counts as whole in spite of rounding.
        whole = left >= whole_bytes * (1 - 1e-12)
        if allow_partial:
            np.floor(left / (size * ROW_ALIGNMENT), out=rows, casting="unsafe", where=~whole)
            rows *= ROW_ALIGNMENT
        np.copyto(rows, tokens, where=whole)
        left = np.where(whole, np.maximum(left - whole_bytes, 0.0), 0.0)
        if not left.any():
            break
    return np.moveaxis(by_class, 0, -1)
