"""Pieces of a unit that several pipeline ranks run at the same time (MSP).

Pipeline rank k of a gang runs piece k. Where ranks of a sequence-parallel group share the tokens of
every unit, each of their parts is cut into as many pieces: piece k is then one run of tokens on
each of them, and nothing of the pipeline's ever crosses from one of them to another.

Legend: c tokens of this rank's part of the piece, C of the whole unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sppo.engine.unit import Unit


class Run(NamedTuple):
    """Consecutive positions of a sequence, ``[start, end)``."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class MspShard:
    """One rank's part of one piece of a unit.

    Attributes:
        unit: The whole unit, as this rank shares it with its sequence-parallel group.
        place: Which piece.
        member: This rank's place in its sequence-parallel group.
        cuts: Where each member's tokens of the unit are cut, from 0 to their number.
    """

    unit: Unit
    place: int
    member: int
    cuts: tuple[tuple[int, ...], ...]

    @property
    def own(self) -> slice:
        """This piece among this rank's tokens of the unit."""
        cuts = self.cuts[self.member]
        return slice(cuts[self.place], cuts[self.place + 1])

    @property
    def tokens(self) -> int:
        """c: of this rank's part of the piece."""
        return self.sizes[self.place]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of every piece on this rank's member of their groups."""
        return tuple(end - begin for begin, end in pairwise(self.cuts[self.member]))

    @property
    def parts(self) -> tuple[int, ...]:
        """Tokens of this piece on every member of the group."""
        return tuple(cuts[self.place + 1] - cuts[self.place] for cuts in self.cuts)

    @property
    def positions_c(self) -> Tensor:
        """See :class:`sppo.engine.unit.Unit`."""
        return self.unit.positions_C[self.own]

    def runs(self, place: int) -> tuple[Run, ...]:
        """Positions in the sequence of piece ``place``, one run for each member of its group."""
        firsts = list(accumulate(self.unit.parts, initial=self.unit.span.start))
        return tuple(
            Run(first + cuts[place], first + cuts[place + 1])
            for first, cuts in zip(firsts, self.cuts, strict=False)
        )

    def rows_of(self, place: int) -> Tensor:
        """The tokens of piece ``place`` among those of the whole unit, ``[C_k]`` indices."""
        start = self.unit.span.start
        return torch.cat([torch.arange(a - start, b - start) for a, b in self.runs(place)])


def cut_shard(unit: Unit, *, place: int, member: int, lengths: Sequence[int]) -> MspShard:
    """Piece ``place`` of a unit that is cut into pieces of ``lengths`` tokens.

    Raises:
        ValueError: a piece would have no token on some rank.
    """
    tokens = sum(lengths)
    ends = (0, *accumulate(lengths))
    cuts = tuple(tuple(local_tokens(end, part, tokens) for end in ends) for part in unit.parts)
    if any(a == b for of_member in cuts for a, b in pairwise(of_member)):
        raise ValueError(
            f"a subsequence of {tokens} tokens is too short for {len(lengths)} pieces on "
            f"{len(unit.parts)} sequence-parallel ranks each: use fewer, longer subsequences, or "
            "parallel.multiplexed=off"
        )
    return MspShard(unit, place, member, cuts)


def local_tokens(end: int, part: int, tokens: int) -> int:
    """Of a unit's first ``end`` of ``tokens``, how many a rank with ``part`` of them takes on."""
    return (2 * end * part + tokens) // (2 * tokens)
