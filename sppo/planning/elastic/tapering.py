"""Tapering: smaller subsequences at both ends of a step, which fill and drain its pipeline sooner.

A packing makes all subsequences of a step take about equal time. The last rank of a pipeline then
idles until the first subsequence has passed the ranks before it, and again while the backward of
the last one returns through them. A taper repacks the short samples of a few sequences of one
subsequence each into smaller subsequences, which grow at the beginning of the step and shrink
towards its end. From one to the next they may grow threefold: a rank runs a forward and a backward,
three times a forward, while the rank before it runs the forward of the next subsequence. They may
shrink by a third: the rank before it runs a backward, two thirds of both, in the meantime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sppo.planning.elastic.packing import PADDING, PackedSamples, packed_sequence


@dataclass(frozen=True, slots=True)
class Taper:
    """Relative tokens of the subsequences that replace some sequences of a step.

    Attributes:
        replaced: Number of sequences whose samples are repacked.
        first: Relative tokens of the subsequences at the beginning of the step, in order.
        last: Relative tokens of the subsequences at its end, in order.
    """

    replaced: int
    first: tuple[float, ...]
    last: tuple[float, ...]


TAPERS = (Taper(1, (), (2, 1)), Taper(2, (1, 2), (3, 2)), Taper(2, (1,), (4, 3, 2)))
"""Tapers to try. In simulations of 2 to 8 ranks one of them is the fastest of fifteen, or within
0.1 % of it."""


def taper_ends(
    packed: PackedSamples,
    lengths: Sequence[int],
    *,
    taper: Taper,
    least_tokens: int = 1,
    multiple: int = 1,
) -> PackedSamples | None:
    """Return packed samples with smaller subsequences at both ends.

    Args:
        packed: Packed samples of a step.
        lengths: Tokens of each sample.
        taper: Number and sizes of the subsequences at the ends.
        least_tokens: Least tokens of every subsequence: sequence-parallel ranks need one each.
        multiple: Multiple of tokens to which the subsequences are padded.

    Returns:
        None if the step has too few sequences of one subsequence, or these too few samples.
    """
    # Many short samples can be divided as wanted, a few long ones cannot.
    single = [
        place for place, sequence in enumerate(packed.sequences) if len(sequence.lengths) == 1
    ]
    chosen = sorted(single, key=lambda place: -len(packed.samples[place]))[: taper.replaced]
    if len(chosen) < taper.replaced:
        return None
    samples = [sample for place in chosen for sample in packed.samples[place] if sample != PADDING]
    groups = _divided(samples, lengths, sizes=(*taper.first, *taper.last))
    if any(sum(lengths[sample] for sample in group) < least_tokens for group in groups):
        return None
    ends = [packed_sequence(group, lengths, multiple=multiple) for group in groups]
    kept = [
        pair
        for place, pair in enumerate(zip(packed.sequences, packed.samples, strict=True))
        if place not in chosen
    ]
    first = len(taper.first)
    sequences, indices = zip(*ends[:first], *kept, *ends[first:], strict=True)
    return PackedSamples(sequences, indices)


def _divided(
    samples: Sequence[int], lengths: Sequence[int], *, sizes: Sequence[float]
) -> list[list[int]]:
    """Divide samples into groups of relative sizes: each, longest first, where most is missing."""
    total = sum(lengths[sample] for sample in samples)
    missing = np.array(sizes, dtype=np.float64) * total / sum(sizes)
    groups: list[list[int]] = [[] for _ in sizes]
    for sample in sorted(samples, key=lambda sample: (-lengths[sample], sample)):
        place = int(np.argmax(missing))
        groups[place].append(sample)
        missing[place] -= lengths[sample]
    return groups
