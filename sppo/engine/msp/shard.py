"""Shards of a unit that several pipeline ranks run at the same time (MSP).

Pipeline rank k of an MSP group runs shard k. Where the tokens of every unit are sharded over a
sequence-parallel group, each of their parts is cut into as many shards: shard k is then one run of
tokens on each of them, and nothing of the pipeline's ever crosses from one of them to another.

Legend: c tokens of this rank's part of the shard, C of the whole unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sppo.engine.unit import Unit
from sppo.parallel.msp_exchange import MspExchange


class Run(NamedTuple):
    """Consecutive positions of a sequence, ``[start, end)``."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class MspShard(Unit):
    """One rank's part of one shard of a unit: its tokens, and where they lie in the whole.

    ``parts`` are the tokens of this shard on each member of the sequence-parallel group.

    Attributes:
        whole: The whole unit, as this rank shares it with its sequence-parallel group.
        place: Which shard.
        member: This rank's place in its sequence-parallel group.
        cuts: Where each member's tokens of the unit are cut, from 0 to their number.
        exchange: With the ranks of the other shards.
    """

    whole: Unit
    place: int
    member: int
    cuts: tuple[tuple[int, ...], ...]
    exchange: MspExchange

    @property
    def first_token(self) -> int:
        """Index of the shard's first token among this rank's tokens of the unit."""
        return self.cuts[self.member][self.place]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of every shard on this rank's member of their groups."""
        return tuple(end - begin for begin, end in pairwise(self.cuts[self.member]))

    def runs(self, place: int) -> tuple[Run, ...]:
        """Positions in the sequence of shard ``place``, one run for each member of its group."""
        firsts = list(accumulate(self.whole.parts, initial=self.span.start))
        return tuple(
            Run(first + cuts[place], first + cuts[place + 1])
            for first, cuts in zip(firsts, self.cuts, strict=False)
        )

    def take(self, whole_C: Tensor) -> Tensor:
        """Return a copy of this shard's tokens of the whole unit's, ``[C_k, ...]``."""
        return torch.cat([whole_C[rows] for rows in self._rows(self.place)])

    def put(self, part_C: Tensor, *, place: int, whole_C: Tensor) -> None:
        """Copy the tokens of shard ``place`` to where they are in the whole unit.

        By slices: an index would be copied to the device first, for which the host would wait.
        """
        parts = torch.split(part_C, [rows.stop - rows.start for rows in self._rows(place)])
        for part, rows in zip(parts, self._rows(place), strict=True):
            whole_C[rows] = part

    def _rows(self, place: int) -> list[slice]:
        """Tokens of shard ``place`` among those of the whole unit, a slice for each run."""
        start = self.span.start
        return [slice(run.start - start, run.end - start) for run in self.runs(place)]


def cut_shard(
    unit: Unit, *, place: int, member: int, lengths: Sequence[int], exchange: MspExchange
) -> MspShard:
    """Shard ``place`` of a unit that is cut into shards of ``lengths`` tokens.

    Raises:
        ValueError: a shard would have no token on some rank.
    """
    tokens = sum(lengths)
    ends = (0, *accumulate(lengths))
    cuts = tuple(tuple(local_tokens(end, part, tokens) for end in ends) for part in unit.parts)
    if any(a == b for of_member in cuts for a, b in pairwise(of_member)):
        raise ValueError(
            f"a subsequence of {tokens} tokens is too short for {len(lengths)} shards on "
            f"{len(unit.parts)} sequence-parallel ranks each: use fewer, longer subsequences, or "
            "parallel.multiplexed=off"
        )
    own = slice(*cuts[member][place : place + 2])
    return MspShard(
        unit.sequence,
        unit.subsequence,
        unit.span,
        parts=tuple(of_member[place + 1] - of_member[place] for of_member in cuts),
        tokens_C=unit.tokens_C[own],
        labels_C=unit.labels_C[own],
        positions_C=unit.positions_C[own],
        span_positions_C=unit.span_positions_C,
        whole=unit,
        place=place,
        member=member,
        cuts=cuts,
        exchange=exchange,
    )


def local_tokens(end: int, part: int, tokens: int) -> int:
    """Return how many of a unit's first ``end`` tokens a rank holds with ``part`` of ``tokens``."""
    return (2 * end * part + tokens) // (2 * tokens)
