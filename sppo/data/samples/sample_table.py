"""Table of the places of all samples in the token stream.

A sample is a document that is trained on by itself. Of a document of n tokens all but the last are
inputs and all but the first are labels, so the sample has n - 1 tokens: its length everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sppo.data.tokens import TokenData, vocabulary_problems


@dataclass(frozen=True, slots=True, eq=False)
class SampleTable:
    """The samples of token data, in the order of the stream."""

    starts: NDArray[np.int64]
    """[num_samples] first input token of each sample in the stream."""
    lengths: NDArray[np.int64]
    """[num_samples] inputs of each sample, at least 1."""
    num_left_out: int
    """Documents that are no sample: those of one token, which has no label, and dropped ones."""

    @property
    def num_samples(self) -> int:
        """Samples in one epoch."""
        return len(self.starts)


def sample_table(document_offsets: NDArray[np.int64], *, length: int, longer: str) -> SampleTable:
    """Find the samples of a stream.

    A document that is cut into several samples shares one token between each two of them, the label
    of one and the first input of the next, so that no label is lost.

    Args:
        document_offsets: [num_documents + 1] first token of each document, then num_tokens.
        length: of the longest sample (``sequence.length``).
        longer: what becomes of longer documents (``sequence.longer``): ``cut`` into samples of
            ``length`` tokens and what is left, ``drop`` or ``refuse``.

    Raises:
        ValueError: some are longer, and ``longer`` is ``refuse``.
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


def check_samples(data: TokenData, table: SampleTable, *, vocab_size: int) -> None:
    """Check that a model can read these ids and that there is a sample to train on.

    Args:
        data: Open token data.
        table: Its samples.
        vocab_size: Rows of the model's token embedding.

    Raises:
        ValueError: every rule that is broken, one per line.
    """
    problems = list(vocabulary_problems(data, vocab_size=vocab_size))
    if table.num_samples == 0:
        problems.append(
            f"{data.directory}: none of its {data.num_documents} documents is a sample: each has "
            "one token, which has no label, or is longer than sequence.length and dropped; raise "
            "sequence.length, write sequence.longer=cut, or prepare other data"
        )
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
    """Starts and lengths of samples of at most ``length`` tokens each."""
    counts = -(-lengths // length)
    first = np.cumsum(counts) - counts
    skipped = (np.arange(counts.sum()) - np.repeat(first, counts)) * length
    left = np.repeat(lengths, counts) - skipped
    return np.repeat(starts, counts) + skipped, np.minimum(left, length)
