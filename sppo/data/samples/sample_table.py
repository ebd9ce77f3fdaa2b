"""Table of the positions and lengths of all samples in the token stream.

A sample is a document, or a part of one, that is trained on by itself. All tokens of a sample but
the last are inputs, and all but the first are labels, so a sample of n tokens has length n - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sppo.data.tokens import TokenData, vocabulary_problems


@dataclass(frozen=True, slots=True, eq=False)
class SampleTable:
    """Positions and lengths of the samples of token data, in the order of the stream."""

    starts: NDArray[np.int64]
    """[num_samples] Position of the first input token of each sample in the stream."""
    lengths: NDArray[np.int64]
    """[num_samples] Number of inputs of each sample, at least 1."""
    num_left_out: int
    """Number of documents that give no sample: of one token, which has no label, or dropped."""

    @property
    def num_samples(self) -> int:
        """Number of samples in one epoch."""
        return len(self.starts)


def sample_table(document_offsets: NDArray[np.int64], *, length: int, longer: str) -> SampleTable:
    """Return the table of the samples of a stream.

    Two successive samples that are cut from one document share a token, the last label of the first
    and the first input of the second, so that no label is lost.

    Args:
        document_offsets: [num_documents + 1] Position of the first token of each document, then
            num_tokens.
        length: Largest length of a sample (``sequence.length``).
        longer: Treatment of longer documents (``sequence.longer``): ``cut`` into samples of
            ``length`` tokens and a shorter last one, ``drop`` or ``refuse``.

    Raises:
        ValueError: Some documents are longer, and ``longer`` is ``refuse``.
    """
    assert length >= 1, f"length {length}"
    assert longer in ("cut", "drop", "refuse"), longer
    lengths = np.diff(document_offsets) - 1
    if longer == "refuse":
        _refuse_longer(lengths, length=length)
    used = lengths > 0
    if longer == "drop":
        used &= lengths <= length
    starts, lengths = np.asarray(document_offsets[:-1])[used], lengths[used]
    num_left_out = len(used) - len(lengths)
    if longer == "cut" and len(lengths) and lengths.max() > length:
        starts, lengths = _cut(starts, lengths, length=length)
    return SampleTable(starts=starts, lengths=lengths, num_left_out=num_left_out)


def no_samples_problem(source: object, document_offsets: NDArray[np.int64]) -> str:
    """Return why none of the documents of `source` is a sample, and what to change."""
    lengths = np.diff(document_offsets) - 1
    problem = f"{source}: none of its {len(lengths)} documents is a sample: "
    dropped = int(np.count_nonzero(lengths > 0))
    if not dropped:
        return problem + "each has at most one token, which has no label; prepare other data"
    return problem + (
        f"longer than sequence.length and dropped: {dropped}, without a label as they have one "
        f"token: {len(lengths) - dropped}; raise sequence.length to at least "
        f"{int(lengths[lengths > 0].min())}, or write sequence.longer=cut"
    )


def check_samples(data: TokenData, table: SampleTable, *, vocab_size: int) -> None:
    """Raise ValueError unless a model can read the ids and there is at least one sample.

    Args:
        data: Open token data.
        table: Samples of the data.
        vocab_size: Number of rows of the model's token embedding.

    Raises:
        ValueError: Some rules are broken; lists all of them, one per line.
    """
    problems = list(vocabulary_problems(data, vocab_size=vocab_size))
    if table.num_samples == 0:
        problems.append(no_samples_problem(data.directory, np.asarray(data.document_offsets)))
    if problems:
        raise ValueError("\n".join(problems))


def _refuse_longer(lengths: NDArray[np.int64], *, length: int) -> None:
    too_long = int(np.count_nonzero(lengths > length))
    if too_long:
        longest = int(lengths.max())
        raise ValueError(
            f"sequence.longer refuse: {too_long} of {len(lengths)} documents are longer than "
            f"sequence.length {length}, the longest has {longest} tokens to train on; raise "
            f"sequence.length to {longest}, or write sequence.longer=cut or drop"
        )


def _cut(
    starts: NDArray[np.int64], lengths: NDArray[np.int64], *, length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut samples into samples of at most ``length`` tokens; return their starts and lengths."""
    counts = -(-lengths // length)
    first = np.cumsum(counts) - counts
    skipped = (np.arange(counts.sum()) - np.repeat(first, counts)) * length
    left = np.repeat(lengths, counts) - skipped
    return np.repeat(starts, counts) + skipped, np.minimum(left, length)
