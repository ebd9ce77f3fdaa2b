"""Distributions of document lengths as published for several corpora, by name.

A *histogram* has the share of documents in each range of lengths. Within a range the logarithm of
the length is uniform, because counts of documents fall with length. A *lognormal* is clamped to a
range. Lengths are in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_KI = 1024


Sample = Callable[[np.random.Generator, int], NDArray[np.float64]]
"""Draws a number of lengths, not rounded, [count]."""


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Distribution of document lengths."""

    source: str
    """Publication of the distribution."""
    sample: Sample


def _histogram(edges: tuple[int, ...], weights: tuple[float, ...]) -> Sample:
    """Return the sampler of a histogram.

    Args:
        edges: Edges of the ranges, ascending; the first is the smallest length.
        weights: Share of documents in each range, in any unit; one fewer than edges.
    """

    def sample(generator: np.random.Generator, count: int) -> NDArray[np.float64]:
        ends = np.cumsum(weights) / sum(weights)
        return np.exp(np.interp(generator.random(count), [0.0, *ends], np.log(edges)))

    return sample


def _lognormal(median: float, sigma: float, *, shortest: int, longest: int) -> Sample:
    """Return the sampler of a lognormal, whose lengths are clamped to a range.

    ``sigma`` is the standard deviation of the natural logarithm of the length.
    """

    def sample(generator: np.random.Generator, count: int) -> NDArray[np.float64]:
        logs = math.log(median) + sigma * generator.standard_normal(count)
        return np.clip(np.exp(logs), shortest, longest)

    return sample


def _instructions(mean: float, sigma: float) -> LengthDistribution:
    """Return the lengths of instruction data, with a mean before clamping, in tokens."""
    return LengthDistribution(
        f"Lengths of instruction data as Megatron-LM mocks them: lognormal, mean {mean:g} tokens, "
        f"sigma {sigma:g}, clamped to 128 to 8192 tokens.",
        _lognormal(mean * math.exp(-(sigma**2) / 2), sigma, shortest=128, longest=8192),
    )


DISTRIBUTIONS: dict[str, LengthDistribution] = {
    "magi": LengthDistribution(
        "Histogram of 13.46 million documents that MagiAttention (SandAI) publishes with its "
        "benchmark of distributed attention: share of documents up to 10 tokens, 50, and so on.",
        _histogram(
            (
                *(1, 10, 50, 100, 200, 500, 1 * _KI, 2 * _KI, 4 * _KI, 8 * _KI, 16 * _KI, 32 * _KI),
                *(64 * _KI, 128 * _KI, 192 * _KI),
            ),
            (
                *(0.22, 2.91, 5.20, 10.23, 28.19, 24.64, 15.65, 7.34, 3.05, 1.29, 0.85, 0.14, 0.17),
                0.14,
            ),
        ),
    ),
    "github": LengthDistribution(
        "Made to have what InfiniPipe (Wang et al., Data-Centric Elastic Pipeline Parallelism) "
        "says of GitHub: 91.5 % of documents up to 8Ki tokens, 0.6 % above 64Ki with 21.6 % of the "
        "tokens, those above 128Ki with 16.2 %. Shares within these ranges are chosen here.",
        _histogram(
            (64, 512, *(size * _KI for size in (2, 8, 16, 32, 64, 128, 240))),
            (32.5, 32.5, 26.5, 4.5, 2.3, 1.1, 0.235, 0.365),
        ),
    ),
    "commoncrawl": LengthDistribution(
        "Made to have what InfiniPipe (Wang et al., Data-Centric Elastic Pipeline Parallelism) "
        "says of CommonCrawl, 70 % of documents up to 2Ki tokens: lognormal with median 1Ki; the "
        "form is chosen here.",
        # 0.524... is the standard normal's 70th percentile.
        _lognormal(_KI, math.log(2) / 0.5244005127080407, shortest=16, longest=192 * _KI),
    ),
    "lognormal-1024": _instructions(1024, 1.5),
    "lognormal-768": _instructions(768, 1.8),
}


def draw(
    name: str, count: int, *, seed: int, longest: int | None = None, scale: float = 1.0
) -> tuple[int, ...]:
    """Draw document lengths from a distribution, the same for the same arguments.

    Args:
        name: Name of a distribution in `DISTRIBUTIONS`.
        count: Number of documents.
        seed: Seed of the PCG64 generator.
        longest: Largest length after scaling, to which longer documents are cut; None for no
            limit.
        scale: Factor of all lengths; below 1 for small machines.

    Returns:
        Length of each document in tokens, at least 1.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    lengths = np.rint(DISTRIBUTIONS[name].sample(generator, count) * scale)
    return tuple(np.clip(lengths, 1, longest).astype(np.int64).tolist())
