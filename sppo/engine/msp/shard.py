"""Shards of a unit that several pipeline ranks run at the same time (MSP).

Pipeline rank k of an MSP group runs shard k. If the tokens of every unit are also sharded over a
sequence-parallel group, the tokens of each member are cut into the same number of shards. Shard k
is then one run of tokens on each member, and pipeline messages stay between ranks with the same
index in their sequence-parallel groups.

Legend: C tokens of the whole unit, C_k tokens of shard k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from sppo.engine.unit import Run, Unit
from sppo.parallel.msp_exchange import MspExchange


@dataclass(frozen=True, slots=True)
class MspShard(Unit):
    """One rank's tokens of one shard of a unit, and their position in the whole unit.

    ``shard_tokens`` has the number of tokens of this shard on each member of the sequence-parallel
    group.

    Attributes:
        whole: Unit that is cut, with this rank's tokens of it.
        shard_index: Index of the shard.
        member: Index of this rank in its sequence-parallel group.
        cuts: For each member, the boundaries of the shards in its tokens of the unit, from 0 to
            their number.
        exchange: Communication with the ranks of the other shards.
    """

    whole: Unit
    shard_index: int
    member: int
    cuts: tuple[tuple[int, ...], ...]
    exchange: MspExchange

    @property
    def first_token(self) -> int:
        """Index of the shard's first token among this rank's tokens of the whole unit."""
        return self.cuts[self.member][self.shard_index]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of tokens of every shard on the rank with this rank's index (`member`)."""
        return tuple(end - begin for begin, end in pairwise(self.cuts[self.member]))

    @property
    def runs(self) -> tuple[Run, ...]:
        """Positions of the shard in the sequence, one run per member."""
        return self.runs_of(self.shard_index)

    def runs_of(self, shard_index: int) -> tuple[Run, ...]:
        """Return the positions of shard ``shard_index`` in the sequence, one run per member."""
        return tuple(
            Run(run.start + cuts[shard_index], run.start + cuts[shard_index + 1])
            for run, cuts in zip(self.whole.runs, self.cuts, strict=True)
        )

    def tokens_of(self, shard_index: int) -> int:
        """Return the number of tokens of shard ``shard_index`` on all members."""
        return sum(run.end - run.start for run in self.runs_of(shard_index))

    def take(self, whole_C: Tensor) -> Tensor:
        """Return a copy of this shard's rows ``[C_k, ...]`` of a tensor of the whole unit."""
        return torch.cat([whole_C[rows] for rows in self._rows(self.shard_index)])

    def put(self, part_C: Tensor, *, shard_index: int, whole_C: Tensor) -> None:
        """Copy the rows of shard ``shard_index`` to their positions in a tensor of the whole unit.

        Copies by slices: an index tensor would have to be copied to the device, and block the host.
        """
        parts = torch.split(part_C, [rows.stop - rows.start for rows in self._rows(shard_index)])
        for part, rows in zip(parts, self._rows(shard_index), strict=True):
            whole_C[rows] = part

    def _rows(self, shard_index: int) -> list[slice]:
        """Return the rows of shard ``shard_index`` in the whole unit, one slice per run."""
        start = self.span.start
        return [slice(run.start - start, run.end - start) for run in self.runs_of(shard_index)]


def as_shard(unit: Unit) -> MspShard:
    """Return ``unit``, which must be a shard."""
    assert isinstance(unit, MspShard), "a whole unit has no peers"
    return unit


def cut_shard(
    unit: Unit, *, shard_index: int, member: int, lengths: Sequence[int], exchange: MspExchange
) -> MspShard:
    """Return shard ``shard_index`` of a unit that is cut into shards of ``lengths`` tokens.

    Args:
        unit: Unit to cut, with this rank's tokens.
        shard_index: Index of the shard.
        member: Index of this rank in its sequence-parallel group.
        lengths: Tokens of each shard over all members.
        exchange: Communication with the ranks of the other shards.

    Raises:
        ValueError: A shard would have no token on some rank.
    """
    tokens = sum(lengths)
    ends = (0, *accumulate(lengths))
    cuts = tuple(tuple(local_tokens(end, own, tokens) for end in ends) for own in unit.shard_tokens)
    if any(a == b for of_member in cuts for a, b in pairwise(of_member)):
        raise ValueError(
            f"a subsequence of {tokens} tokens is too short for {len(lengths)} shards on "
            f"{len(unit.shard_tokens)} sequence-parallel ranks each: use fewer, longer "
            "subsequences, or parallel.multiplexed=off"
        )
    own = slice(*cuts[member][shard_index : shard_index + 2])
    return MspShard(
        unit.sequence,
        unit.subsequence,
        unit.span,
        shard_tokens=tuple(
            of_member[shard_index + 1] - of_member[shard_index] for of_member in cuts
        ),
        tokens_C=unit.tokens_C[own],
        labels=unit.labels,
        positions_C=unit.positions_C[own],
        span_positions_C=unit.span_positions_C,
        whole=unit,
        shard_index=shard_index,
        member=member,
        cuts=cuts,
        exchange=exchange,
    )


def local_tokens(end: int, own: int, tokens: int) -> int:
    """Return the rounded number of a unit's first ``end`` tokens on a rank that holds ``own``.

    Args:
        end: Number of first tokens.
        own: Number of the unit's tokens that the rank holds.
        tokens: Number of the unit's tokens on all ranks.
    """
    return (2 * end * own + tokens) // (2 * tokens)
