"""Placement of the saved activations of one subsequence on one stage, which engines follow.

A row is one token of the subsequence; the tensor classes are defined in
:mod:`sppo.activations.tensor_classes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from sppo.activations.tensor_classes import ATTENTION, CLASSES

Rows = tuple[int, int, int]
"""Rows, i.e. tokens, of x_in, attention and linear."""


@dataclass(frozen=True, slots=True)
class SubsequencePlacement:
    """Rows of every tensor class of one subsequence on one stage, by placement.

    A tensor's first rows are offloaded, the next are retained, the last are recomputed.

    Plan files keep the names that their first version gave the rows: kept, moved, rebuilt.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    retained: Annotated[Rows, Field(alias="kept")]
    """Rows of each class that stay on the device."""
    offloaded: Annotated[Rows, Field(alias="moved")]
    """Rows of each class that are copied to the next tier and back."""
    recomputed: Annotated[Rows, Field(alias="rebuilt")]
    """Rows of each class that backward recomputes."""
    slot_offset_bytes: int = 0
    """Planned offset in the tier of the offloaded rows of all the layers."""

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
