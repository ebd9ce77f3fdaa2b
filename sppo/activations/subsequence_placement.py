"""What one stage does with the saved tensors of one subsequence, in rows, and what decides it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from sppo.activations.tensor_classes import ATTENTION, CLASSES

Rows = tuple[int, int, int]
"""Rows, i.e. tokens, of x_in, attention and linear, see :mod:`sppo.activations.tensor_classes`."""


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
        """Whether every layer's attention output is there for backward."""
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
