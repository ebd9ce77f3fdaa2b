"""Samples of a run: the table of their positions and lengths, and the samples of each step.

A sample is what is trained on by itself: a document or a part of one, or a sequence of fixed length
that is cut from the stream across documents. All tokens of a sample but the last are inputs, and
all but the first are labels, so a sample of n tokens has length n - 1. Successive samples of the
stream, or of one document, share a token, so that no label is lost.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate, islice

import numpy as np
from numpy.typing import NDArray

from sppo.config.base import MOST_SAMPLES
from sppo.data.order import Order

_SPARE = 8
"""One sample is looked at beyond those that a step is expected to have, for so many of them."""
_TOGETHER = 64
"""Steps whose samples are looked at together to count the steps of a run."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleTable:
    """Positions and lengths of the samples of token data, in the order of the stream."""

    starts: NDArray[np.int64] | range
    """[num_samples] Position of the first input token of each sample in the stream."""
    lengths: NDArray[np.int64]
    """[num_samples] Number of inputs of each sample, at least 1."""
    num_left_out: int = 0
    """Number of documents that give no sample: of one token, which has no label, or dropped."""
    noun: str = "sample"
    """Name of a sample in messages."""
    firsts: tuple[int, ...] = (0,)
    """Number of the first sample of each source; positions are those in its own stream."""

    @property
    def num_samples(self) -> int:
        """Number of samples in one epoch."""
        return len(self.starts)

    def source_of(self, sample: int) -> int:
        """Return the index of the source of a sample."""
        return bisect_right(self.firsts, sample) - 1


def joined_table(tables: Sequence[SampleTable]) -> SampleTable:
    """Return the table of the samples of several sources, one source after another."""
    if len(tables) == 1:
        return tables[0]
    counts = [table.num_samples for table in tables]
    return SampleTable(
        np.concatenate([np.asarray(table.starts, dtype=np.int64) for table in tables]),
        np.concatenate([table.lengths for table in tables]),
        sum(table.num_left_out for table in tables),
        noun=tables[0].noun,
        firsts=tuple(accumulate(counts[:-1], initial=0)),
    )


def stream_table(num_tokens: int, *, length: int) -> SampleTable:
    """Return the table of the samples of ``length`` tokens in a stream, whose rest is not used."""
    count = (num_tokens - 1) // length
    starts = range(0, count * length, length)
    lengths = np.broadcast_to(np.int64(length), len(starts))
    return SampleTable(starts, lengths, noun="sequence")


def sample_table(document_offsets: NDArray[np.int64], *, length: int, longer: str) -> SampleTable:
    """Return the table of the samples of a stream that are documents.

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


@dataclass(frozen=True, slots=True, eq=False)
class StepSamples:
    """Samples of every step, as indices into a table.

    Has no state between calls: a step depends only on its position, the number of samples that the
    run consumed before, so a resumed run gets the same steps.
    """

    table: SampleTable
    order: Order
    """Order of the samples over the positions of the run."""
    _: KW_ONLY
    samples_per_step: int | None = None
    """Number of samples of a step; None if ``tokens_per_step`` limits a step."""
    tokens_per_step: int | None = None
    """Largest number of tokens of a step, which has at least one sample; None for no limit."""

    def __post_init__(self) -> None:
        assert self.num_samples >= 1, "check_tokens() comes first"
        given = (self.samples_per_step, self.tokens_per_step)
        assert given.count(None) == 1, f"samples_per_step, tokens_per_step: {given}"

    @property
    def num_samples(self) -> int:
        """Number of samples of the data: of all sources, each once."""
        return self.table.num_samples

    def step_samples(self, position: int) -> tuple[int, ...]:
        """Return the indices of the samples of the step that begins at ``position``, in order.

        A step at the end of an epoch continues with samples of the next epoch.

        Args:
            position: Number of samples that the run consumed before the step.
        """
        count = self.samples_per_step or self._samples_within_limit(position)
        return tuple(self.order.sequence_indices(position, count).tolist())

    def steps(self) -> Iterator[tuple[int, ...]]:
        """Yield the samples of each step from the beginning of the run on, without an end."""
        position = 0
        while True:
            samples = self.step_samples(position)
            yield samples
            position += len(samples)

    def num_steps(self, num_samples: int) -> int:
        """Return the fewest steps that consume at least a number of samples."""
        if self.samples_per_step is not None:
            return -(-num_samples // self.samples_per_step)
        ends = enumerate(self._step_ends(), start=1)
        return next(steps for steps, end in ends if end >= num_samples)

    def num_consumed(self, num_steps: int) -> int:
        """Return the number of samples that a number of steps consumes."""
        if self.samples_per_step is not None:
            return num_steps * self.samples_per_step
        return next(islice(self._step_ends(), num_steps - 1, None))

    def _step_ends(self) -> Iterator[int]:
        """Yield how many samples are consumed after each step of at most ``tokens_per_step``.

        Steps are those of :meth:`step_samples`; many samples are looked at together.
        """
        limit = self.tokens_per_step
        assert limit is not None, "asked for only with tokens_per_step"
        position, looked_at = 0, _TOGETHER * self._expected_samples()
        while True:
            samples = self.order.sequence_indices(position, looked_at)
            ends = np.cumsum(self.table.lengths[samples]).tolist()
            begin, tokens = 0, 0
            while True:
                most = min(looked_at, begin + MOST_SAMPLES)
                end = bisect_right(ends, tokens + limit, begin, most)
                if end == looked_at:  # the step may have samples beyond these
                    break
                begin = max(begin + 1, end)
                tokens = ends[begin - 1]
                yield position + begin
            looked_at *= 1 + (begin == 0)
            position += begin

    def _expected_samples(self) -> int:
        """Return the number of samples of a step of average samples, at least 1."""
        limit = self.tokens_per_step
        assert limit is not None, "asked for only with tokens_per_step"
        expected = limit * self.num_samples // int(self.table.lengths.sum())
        return min(max(1, expected), MOST_SAMPLES)

    def _samples_within_limit(self, position: int) -> int:
        """Return the number of samples from ``position`` on within the limits of a step, or 1."""
        limit = self.tokens_per_step
        assert limit is not None, "asked for only with tokens_per_step"
        expected = self._expected_samples()
        looked_at = expected + expected // _SPARE + 1
        while True:
            samples = self.order.sequence_indices(position, looked_at)
            ends = np.cumsum(self.table.lengths[samples])
            within = int(np.searchsorted(ends, limit, side="right"))
            if within < looked_at or looked_at >= MOST_SAMPLES:
                return min(max(1, within), MOST_SAMPLES)
            looked_at *= 2

    def lengths(self, samples: Sequence[int]) -> tuple[int, ...]:
        """Return the length of each sample: the number of its inputs, and of its labels."""
        return tuple(self.table.lengths[list(samples)].tolist())
