"""Baseline packings of the samples of a step into sequences, for comparison with the planned one.

All functions return a `Packing`, which contains the tokens of every sample once. Sequences are
padded to the same multiple of tokens as in the planner of steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sppo.cost.packed_sequence import PackedSequence
from sppo.planning.elastic.packing import PADDING, PackedSamples


class Piece(NamedTuple):
    """Part of a sample: its tokens [begin, end)."""

    sample: int
    begin: int
    end: int

    @property
    def tokens(self) -> int:
        """Number of tokens of the piece."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Packing:
    """Sequences of a step and the samples in them.

    Attributes:
        sequences: Packed sequences: the documents that attention isolates, and the cuts.
        pieces: Pieces of samples of each sequence, in order; the tokens after them are padding.
    """

    sequences: tuple[PackedSequence, ...]
    pieces: tuple[tuple[Piece, ...], ...]

    @property
    def packed(self) -> PackedSamples:
        """The packing in the form that planners of steps accept."""
        samples = (tuple(piece.sample for piece in pieces) for pieces in self.pieces)
        return PackedSamples(self.sequences, tuple(samples))


def padded(lengths: Sequence[int], *, chunk_tokens: int, multiple: int = 1) -> Packing:
    """Pack each sample into a sequence of its own, padded to the longest sample of the step."""
    longest = -(-max(lengths) // multiple) * multiple
    sequence = _cut((longest,), chunk_tokens, multiple)
    pieces = tuple((Piece(sample, 0, tokens),) for sample, tokens in enumerate(lengths))
    return Packing((sequence,) * len(lengths), pieces)


def stream(
    lengths: Sequence[int], *, chunk_tokens: int, row_tokens: int, multiple: int = 1
) -> Packing:
    """Concatenate all samples and cut them into rows of equal length; the last may be shorter.

    A sample that is cut becomes two documents, the second without the context of the first.
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
    """Pack samples into chunks of a fixed size, the baseline that InfiniPipe calls Seq1F1B.

    A sample longer than a chunk is a sequence of its own, cut into chunks. The other samples are
    packed first-fit, in order, into sequences of at most one chunk.
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
    """Return the packing that the planner of steps chose."""
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
    """Return documents side by side, padded to `multiple` and cut every `chunk_tokens` tokens."""
    padding = -sum(documents) % multiple
    whole, rest = divmod(sum(documents) + padding, chunk_tokens)
    return PackedSequence(
        (*documents, *([padding] if padding else [])),
        (*[chunk_tokens] * whole, *([rest] if rest else [])),
    )
