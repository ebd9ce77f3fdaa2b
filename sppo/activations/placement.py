"""Placement of saved activations: which rows are retained, offloaded and recomputed.

A row is one token of one subsequence; the tensor classes are defined in
:mod:`sppo.activations.tensor_classes`. Engines follow the :class:`SubsequencePlacement` of each
subsequence; policies decide about all stages and subsequences at once from :class:`PolicyInputs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
    """

    retained: Counts
    offloaded: Counts
    recomputed: Counts

    @property
    def tokens(self) -> Counts:
        """Tokens of every subsequence, [subsequences]."""
        tables = (self.retained, self.offloaded, self.recomputed)
        tokens: Counts = np.sum([table[0, :, X_IN] for table in tables], axis=0)
        return tokens

    @cached_property
    def alike(self) -> Sequence[int]:
        """First stage with the same rows, for each stage, [stages]."""
        return alike_stages(self.retained, self.offloaded, self.recomputed)

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


@dataclass(frozen=True, slots=True, eq=False)
class CopySlots:
    """Device memory for copies: a fixed number of block slots, whatever is copied when.

    Attributes:
        row_bytes: Bytes of the slots per row of the subsequence that offloads most, [stages, 3].
        padding_bytes: Upper bound of the bytes that alignment adds to the slots, [stages].
        joined_bytes: Upper bound of the bytes for joining the parts of a cut class of one layer,
            [stages].
        queries_bytes: Bytes for joining a class whose last part is recomputed, which the working
            set does not count already: queries and keys of one layer, [stages].
        taken_at_once: Number of layers whose tensors backward holds at once, unless it recomputes
            attention, [stages].
    """

    row_bytes: Table
    padding_bytes: Table
    joined_bytes: Table
    queries_bytes: Table
    taken_at_once: Table

    def of_stage(self, stage: int) -> CopySlots:
        """Return the slots of one stage."""
        only = slice(stage, stage + 1)
        return CopySlots(
            self.row_bytes[only],
            self.padding_bytes[only],
            self.joined_bytes[only],
            self.queries_bytes[only],
            self.taken_at_once[only],
        )

    def reserved(self, placement: ActivationPlacement) -> Table:
        """Return the most bytes that a placement needs, [stages]; for one stage, per row."""
        needed: Table = self.of_blocks(placement.offloaded) + self.joined(placement).max(axis=1)
        return needed

    def of_blocks(self, offloaded: Counts) -> Table:
        """Return the bytes of slots for offloaded rows, [stages, subsequences, 3] to [stages]."""
        slots = (offloaded @ self.row_bytes[:, :, None])[:, :, 0].max(axis=1)
        taken: Table = slots + self.padding_bytes * (slots > 0)
        return taken

    def joined(self, placement: ActivationPlacement) -> Table:
        """Return the bytes for joining the cut classes of each subsequence, [stages, N]."""
        retains, offloads = placement.retained > 0, placement.offloaded > 0
        recomputes = placement.recomputed > 0
        cut_with_rest = (retains | offloads) & recomputes
        joined: Table = self.joined_bytes[:, None] * _any_class(retains & offloads & ~recomputes)
        joined += self.queries_bytes[:, None] * _any_class(cut_with_rest)
        joined *= np.where(recomputes[:, :, ATTENTION], 1.0, self.taken_at_once[:, None])
        return joined


def _any_class(holds: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return whether any class is True, [stages, subsequences]; many times faster than np.any."""
    return holds[:, :, X_IN] | holds[:, :, ATTENTION] | holds[:, :, LINEAR]


@dataclass(frozen=True, slots=True, eq=False)
class PolicyInputs:
    """Bytes, seconds and available memory that a policy decides from.

    Tables are [stages, subsequences] unless noted.

    Attributes:
        tokens: Tokens of every subsequence, [subsequences].
        row_bytes: Bytes of one row of each class on one device, all layers, [stages, 3].
        shared_input_bytes: Bytes of one row's layer inputs that are not saved because layers share
            a saved input, [stages]; see :func:`saved_bytes`.
        in_flight: Number of times a subsequence is held at once in the worst case; more than once
            if several sequences overlap.
        sequences: Number of sequences that are in the next tier at once, [stages].
        next_forward_s: Seconds of compute of the next subsequence's forward, which copies of this
            subsequence overlap; without the group's collectives, which use the same links.
        hidden_bytes: Bytes that are copied out during the next subsequence's forward and back
            during its backward, which precedes the backward of this subsequence.
        linear_recompute_s: Seconds to recompute the linear class of a whole subsequence.
        attention_recompute_s: Seconds to recompute the attention class of a whole subsequence.
        copy_bytes_per_s: Rate of the slower copy direction; 0 without another tier.
        device_bytes: Available bytes for saved activations on each stage's device, [stages].
        tier_bytes: Available bytes in the next tier for each stage, [stages].
        slots: Device memory for copies.
        allow_partial: Whether a class may be cut; if not, all rows of a class are placed alike.
        lasts: Index of the last subsequence of each sequence, whose backward starts at once.
    """

    tokens: Counts
    row_bytes: Table
    shared_input_bytes: Table
    in_flight: Counts
    sequences: Counts
    next_forward_s: Table
    hidden_bytes: Table
    linear_recompute_s: Table
    attention_recompute_s: Table
    copy_bytes_per_s: float
    device_bytes: Table
    tier_bytes: Table
    slots: CopySlots
    allow_partial: bool = True
    lasts: tuple[int, ...] = (-1,)

    @property
    def class_bytes(self) -> Table:
        """Bytes of a whole class, [stages, subsequences, 3]."""
        result: Table = self.tokens[None, :, None] * self.row_bytes[:, None, :]
        return result


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
