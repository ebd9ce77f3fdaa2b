"""Placement of saved activations: which rows are retained, offloaded and recomputed.

A row is one token of one subsequence; the classes are those of
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
"""A cut class is cut at a multiple of this many rows."""


@dataclass(frozen=True, slots=True)
class SubsequencePlacement:
    """Rows of every tensor class of one subsequence on one stage, by what happens to them.

    A tensor's first rows are offloaded, the next are retained, the last are recomputed.

    Attributes:
        retained: Rows of each class that stay on the device.
        offloaded: Rows that go to the next tier and come back.
        recomputed: Rows that backward computes again.
        slot_offset_bytes: Where the offloaded rows of all its layers begin in the tier, as planned.

    Plan files keep the names that their first version gave the rows: kept, moved, rebuilt.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    retained: Annotated[Rows, Field(alias="kept")]
    offloaded: Annotated[Rows, Field(alias="moved")]
    recomputed: Annotated[Rows, Field(alias="rebuilt")]
    slot_offset_bytes: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the subsequence."""
        return self.retained[0] + self.offloaded[0] + self.recomputed[0]

    @property
    def attention_saved(self) -> bool:
        """Return whether every layer's attention output is there for backward."""
        return self.recomputed[ATTENTION] == 0

    def sharded(self, parts: Sequence[int]) -> tuple[SubsequencePlacement, ...]:
        """Placements of shards of the subsequence that have ``parts`` tokens each.

        All save the same share of their rows, rounded down, so that what one recomputes all do.
        """
        tokens = self.tokens
        saved = [m + k for m, k in zip(self.offloaded, self.retained, strict=True)]
        shards = []
        for part in parts:
            offloaded = _rows(rows * part // tokens for rows in self.offloaded)
            kept = _rows(rows * part // tokens for rows in saved)
            shards.append(
                SubsequencePlacement(
                    retained=_rows(s - m for s, m in zip(kept, offloaded, strict=True)),
                    offloaded=offloaded,
                    recomputed=_rows(part - s for s in kept),
                )
            )
        return tuple(shards)


PlacementOf = Callable[[tuple[int, ...]], tuple[SubsequencePlacement, ...]]
"""Lengths of a sequence's subsequences -> what one stage does with each."""


def planned_placement(planned: tuple[SubsequencePlacement, ...]) -> PlacementOf:
    """One stage of a plan, for sequences cut as it says."""

    def placement_of(lengths: tuple[int, ...]) -> tuple[SubsequencePlacement, ...]:
        found = tuple(placement.tokens for placement in planned)
        assert found == lengths, f"the plan is for subsequences of {found}, not {lengths} tokens"
        return planned

    return placement_of


def check_whole_classes(placements: Iterable[SubsequencePlacement]) -> None:
    """Refuse what ranks with shards of the weights cannot do: recompute the last rows of a tensor.

    Raises:
        ValueError: a class is recomputed in part.
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
    """Rows of every class by what happens to them.

    Attributes:
        retained: [stages, subsequences, 3], rows that stay on the device.
        offloaded: the same, rows that go to the next tier and come back.
        recomputed: the same, rows that backward computes again.
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
        """Return, for each stage, the first stage with the same rows, [stages]."""
        return alike_stages(self.retained, self.offloaded, self.recomputed)

    @property
    def offloads_anything(self) -> bool:
        """Return whether any row leaves the device."""
        return bool(self.offloaded.any())


def alike_stages(*tables: npt.NDArray[Any]) -> list[int]:
    """Return for each stage the first one with equal rows, [stages].

    Args:
        tables: [stages, ...] each.
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
    """Device memory that copies take: room for so many blocks, whatever is copied when.

    Attributes:
        row_bytes: What the slots take for every row of the subsequence that moves most,
            [stages, 3].
        padding_bytes: What alignment adds to that at most, [stages].
        joined_bytes: What putting a cut class of one layer together takes at most, [stages].
        queries_bytes: Of that, what counts nowhere else where the other part is recomputed,
            [stages].
        taken_at_once: Layers whose tensors backward holds at once, unless it recomputes attention,
            [stages].
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
        """Return the bytes that a placement needs at most, [stages]; for one stage, per row."""
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
    """Return whether any class is True, [stages, subsequences]; many times faster than any."""
    return holds[:, :, X_IN] | holds[:, :, ATTENTION] | holds[:, :, LINEAR]


@dataclass(frozen=True, slots=True, eq=False)
class PolicyInputs:
    """Bytes, seconds and room that a policy decides from. Tables are [stages, subsequences].

    Attributes:
        tokens: Tokens of every subsequence, [subsequences].
        row_bytes: Bytes of one row of each class on one device, all layers, [stages, 3].
        shared_input_bytes: Of a row's inputs, those that layers do not save which share one,
            [stages]; see :func:`saved_bytes`.
        in_flight: How many times a subsequence is held at once at the worst moment; more than
            once where several sequences overlap.
        sequences: Sequences that have room in the next tier at once, [stages].
        next_forward_s: Compute of the next subsequence's forward, behind which copies of this one
            hide: without the exchanges of its group, which use the same wires.
        hidden_bytes: What is out during that and back during the next subsequence's backward,
            which comes before its own.
        linear_recompute_s: Price of recomputing the linear class of a whole subsequence.
        attention_recompute_s: Price of recomputing attention.
        copy_bytes_per_s: Rate of the slower copy direction; 0 without another tier.
        device_bytes: Room for saved activations on each stage's device, [stages].
        tier_bytes: Room in the next tier for each stage, [stages].
        slots: Device memory that copies take.
        allow_partial: Whether a class may be cut; if not, all of it has one fate.
        lasts: The last subsequence of each sequence, whose backward starts at once.
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
    """Bytes of some saved rows of each subsequence, all layers of a stage.

    Without its attention output no layer can recompute the input of the one above: then every
    layer saves its own.

    Args:
        rows: of each class, [..., subsequences, 3].
        recomputed: rows of the same subsequences that backward recomputes, of the same shape.
        row_bytes: of one row of each class, [..., 3].
        shared_input_bytes: of one row's inputs that layers do not save which share one, [...].

    Returns:
        [..., subsequences].
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
    """Rows that make up at most ``wanted`` bytes, class after class; the last class may be cut.

    Args:
        wanted: bytes to make up, [..., subsequences].
        tokens: of every subsequence, [subsequences].
        row_bytes: of one row of each class, [..., 3].
        allow_partial: whether the last class may be cut.

    Returns:
        [..., subsequences, 3].
    """
    by_class = np.zeros((len(CLASSES), *wanted.shape), dtype=np.int64)
    left = wanted.astype(np.float64)
    for index, rows in enumerate(by_class):
        size = np.maximum(row_bytes[..., index], 1e-300)[..., None]
        whole_bytes = tokens * size
        # A tolerance, so that a whole class counts as whole in spite of rounding.
        whole = left >= whole_bytes * (1 - 1e-12)
        if allow_partial:
            np.floor(left / (size * ROW_ALIGNMENT), out=rows, casting="unsafe", where=~whole)
            rows *= ROW_ALIGNMENT
        np.copyto(rows, tokens, where=whole)
        left = np.where(whole, np.maximum(left - whole_bytes, 0.0), 0.0)
        if not left.any():
            break
    return np.moveaxis(by_class, 0, -1)
