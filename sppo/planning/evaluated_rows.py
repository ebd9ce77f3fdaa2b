"""Rows of a set of sequences: what is evaluated as one sequence, and where it is cut.

A row is one sequence of a stream, or several samples packed side by side. Replicas evaluate equally
many rows of equally many subsequences, because they may gather weights together (ZeRO-3): a replica
whose row is shorter, or is missing, gets subsequences without labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sppo.planning.partition import lengths_of


@dataclass(frozen=True, slots=True)
class Row:
    """Samples that are evaluated as one sequence; none in a row that only fills a replica."""

    samples: tuple[int, ...]
    boundaries: tuple[int, ...]
    """Boundaries of the subsequences, from 0 to the length of the row."""

    @property
    def num_subsequences(self) -> int:
        """Number of subsequences of the row."""
        return len(self.boundaries) - 1


_NO_ROW = Row((), (0,))


def rows_of(
    lengths: Sequence[int], *, boundaries: tuple[int, ...], packs: bool, degree: int = 1
) -> Iterator[Row]:
    """Yield the rows of samples, which are numbered in their order.

    Args:
        lengths: Tokens of each sample, or sequence of the stream.
        boundaries: Boundaries of the subsequences of a sequence of full length.
        packs: Pack samples, in their order, into rows that are not longer than a subsequence; a
            longer sample is a row of its own. False for sequences of the stream.
        degree: Ranks over which the tokens of a subsequence are sharded: its fewest tokens.
    """
    if not packs:
        yield from (Row((index,), boundaries) for index in range(len(lengths)))
        return
    own: list[int] = []
    most, tokens = max(lengths_of(boundaries)), 0
    for index, length in enumerate(lengths):
        if own and tokens + length > most:
            yield Row(tuple(own), _cuts(tokens, most=most, least=degree))
            own, tokens = [], 0
        own.append(index)
        tokens += length
    if own:
        yield Row(tuple(own), _cuts(tokens, most=most, least=degree))


def _cuts(tokens: int, *, most: int, least: int) -> tuple[int, ...]:
    """Return cuts after every `most` tokens, the last one padded or earlier if few tokens follow.

    Args:
        tokens: Tokens of the row.
        most: Most tokens of a subsequence.
        least: Fewest tokens of a subsequence, at most `most`.
    """
    cuts = [*range(0, tokens, most), max(tokens, least)]
    if len(cuts) > 2 and cuts[-1] - cuts[-2] < least:
        cuts[-2] = cuts[-1] - least
    return tuple(cuts)


def rows_of_replica(
    rows: Sequence[Row], *, replica: int, replicas: int, degree: int
) -> tuple[Row, ...]:
    """Return the rows of one replica: every `replicas`-th row, filled up to those of the others.

    Args:
        rows: All rows of the set.
        replica: Index of the replica.
        replicas: Number of replicas.
        degree: Ranks over which the tokens of a subsequence are sharded.
    """
    own = []
    for first in range(0, len(rows), replicas):
        beside = rows[first : first + replicas]
        most = max(row.num_subsequences for row in beside)
        row = beside[replica] if replica < len(beside) else _NO_ROW
        end, missing = row.boundaries[-1], most - row.num_subsequences
        more = range(end + degree, end + (missing + 1) * degree, degree)
        own.append(replace(row, boundaries=(*row.boundaries, *more)))
    return tuple(own)
