"""Ways to pack the samples of a step into sequences, which are compared with the planned one.

All of them give a `Packing`; the tokens of every sample are in it once. Sequences are padded to a
multiple of tokens where the planner of steps pads them, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sppo.cost.packed_sequence import PackedSequence
from sppo.planning.elastic.packing import PADDING, PackedSamples


class Piece(NamedTuple):
    """Tokens [begin, end) of a sample."""

    sample: int
    begin: int
    end: int

    @property
    def tokens(self) -> int:
        """Return the number of tokens."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Packing:
    """The sequences of a step.

    Attributes:
        sequences: What attention isolates in each, and how it is cut.
        pieces: What each has of which samples, in order; what it has beyond them is padding.
    """

    sequences: tuple[PackedSequence, ...]
    pieces: tuple[tuple[Piece, ...], ...]

    @property
    def packed(self) -> PackedSamples:
        """Return the packing as planners of steps take it."""
        samples = (tuple(piece.sample for piece in pieces) for pieces in self.pieces)
        return PackedSamples(self.sequences, tuple(samples))


def padded(lengths: Sequence[int], *, chunk_tokens: int, multiple: int = 1) -> Packing:
    """Return each sample in a sequence of its own, padded to the longest of the step."""
    longest = -(-max(lengths) // multiple) * multiple
    sequence = _cut((longest,), chunk_tokens, multiple)
    pieces = tuple((Piece(sample, 0, tokens),) for sample, tokens in enumerate(lengths))
    return Packing((sequence,) * len(lengths), pieces)


def stream(
    lengths: Sequence[int], *, chunk_tokens: int, row_tokens: int, multiple: int = 1
) -> Packing:
    """Return the stream of all samples cut into rows, the last of which is shorter.

    A sample that a cut falls into is two documents, the second without the context of the first.
    """
    rows: list[list[Piece]] = [[]]
    room = row_tokens
    for sample, tokens in enumerate(lengths):
        begin = 0
        while begin < tokens:
            if not room:
                rows.append([])
                room = row_tokens
            end = min(tokens, begin + room)
            rows[-1].append(Piece(sample, begin, end))
            room -= end - begin
            begin = end
    return _packing(rows, chunk_tokens, multiple)


def fixed_chunks(lengths: Sequence[int], *, chunk_tokens: int, multiple: int = 1) -> Packing:
    """Return chunks of a fixed number of tokens, the baseline that InfiniPipe calls Seq1F1B.

    Longer samples are cut into such chunks, each a sequence of its own. The others are packed
    first-fit, in order, up to so many tokens.
    """
    rows: list[list[Piece]] = []
    open_rows: list[tuple[int, list[Piece]]] = []
    for sample, tokens in enumerate(lengths):
        piece = Piece(sample, 0, tokens)
        if tokens > chunk_tokens:
            rows.append([piece])
            continue
        for place, (filled, row) in enumerate(open_rows):
            if filled + tokens <= chunk_tokens:
                row.append(piece)
                open_rows[place] = filled + tokens, row
                break
        else:
            rows.append([piece])
            open_rows.append((tokens, rows[-1]))
    return _packing(rows, chunk_tokens, multiple)


def planned(packed: PackedSamples, lengths: Sequence[int]) -> Packing:
    """Return what the planner of steps made of the samples."""
    pieces = tuple(
        tuple(Piece(sample, 0, lengths[sample]) for sample in samples if sample != PADDING)
        for samples in packed.samples
    )
    return Packing(packed.sequences, pieces)


def _packing(rows: Iterable[Sequence[Piece]], chunk_tokens: int, multiple: int) -> Packing:
    pieces = tuple(tuple(row) for row in rows)
    sequences = (
        _cut(tuple(piece.tokens for piece in row), chunk_tokens, multiple) for row in pieces
    )
    return Packing(tuple(sequences), pieces)


def _cut(documents: tuple[int, ...], chunk_tokens: int, multiple: int) -> PackedSequence:
    """Return documents side by side, padded to a multiple and cut every so many tokens."""
    padding = -sum(documents) % multiple
    whole, rest = divmod(sum(documents) + padding, chunk_tokens)
    return PackedSequence(
        (*documents, *([padding] if padding else [])),
        (*[chunk_tokens] * whole, *([rest] if rest else [])),
    )
