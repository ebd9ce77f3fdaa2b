"""Shortest subsequence whose copy is hidden by the compute that runs at the same time.

For a subsequence of c tokens after a context of p tokens, copying takes ``c * bytes / rate``;
compute takes ``c * a`` for products and ``c * (p + c / 2) * b`` for attention. Both are
proportional to c, so the mean context ``p + c / 2`` decides: a copy is hidden from
``c = 2 * ((bytes / rate - a) / b - p)`` tokens on, and at any length if ``p`` alone is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OverlapPoint:
    """Times of one unit's compute alone, its copy alone, and both; medians, seconds per unit.

    Attributes:
        tokens: Tokens of the subsequence.
        context: Tokens before the subsequence.
        moved_bytes: Bytes that one layer saves for the subsequence, all of which are copied.
        products_s: Products with weights, without copies.
        attention_s: Attention, without copies.
        copy_s: Copies, without compute.
        products_copying_s: Products while copies run.
        attention_copying_s: Attention while copies run.
        exposed_s: Time that compute waits for copies.
        spread: Difference between the fastest and the slowest round of the unit with copies,
            relative to the median.
    """

    tokens: int
    context: int
    moved_bytes: int
    products_s: float
    attention_s: float
    copy_s: float
    products_copying_s: float
    attention_copying_s: float
    exposed_s: float
    spread: float = 0.0

    @property
    def compute_s(self) -> float:
        """Seconds of the unit without copies."""
        return self.products_s + self.attention_s

    @property
    def compute_copying_s(self) -> float:
        """Seconds of the unit while copies run, without the time that compute waits."""
        return self.products_copying_s + self.attention_copying_s

    @property
    def slowdown(self) -> float:
        """Fraction by which copies slow the compute that hides them; noise may make it negative."""
        return self.compute_copying_s / self.compute_s - 1


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Length of the shortest subsequence at one context whose copy is hidden.

    Attributes:
        context: Tokens before the subsequence.
        everything_tokens: Length in tokens if everything that a layer saves is copied; 0 if copies
            are hidden at any length.
        kept_tokens: Length in tokens if only the layer's input and attention's output are copied;
            0 if copies are hidden at any length.
        everything_measured: Whether ``everything_tokens`` lies within the measured lengths.
        kept_measured: Whether ``kept_tokens`` lies within the measured lengths.
    """

    context: int
    everything_tokens: float
    kept_tokens: float
    everything_measured: bool
    kept_measured: bool


def break_evens(points: Sequence[OverlapPoint], *, kept_ratio: float) -> tuple[BreakEven, ...]:
    """Return the break-even lengths at every measured context.

    Args:
        points: Timings of units with copies.
        kept_ratio: Bytes of a layer's input and attention's output over all bytes that it saves.
    """
    found = []
    for context in sorted({point.context for point in points}):
        row = sorted((p for p in points if p.context == context), key=lambda p: p.tokens)
        everything, is_measured = break_even_tokens(row, ratio=1.0)
        kept, kept_measured = break_even_tokens(row, ratio=kept_ratio)
        found.append(BreakEven(context, everything, kept, is_measured, kept_measured))
    return tuple(found)


def break_even_tokens(row: Sequence[OverlapPoint], *, ratio: float) -> tuple[float, bool]:
    """Return the break-even length at one context, and whether it is within measured lengths.

    It is calculated from the shortest measured subsequence whose copy is hidden, else the longest.

    Args:
        row: Timings at that context, by ascending length.
        ratio: Fraction of the bytes that is copied.

    Returns:
        (tokens, or 0 if copies are hidden at any length; whether the result is within the measured
        lengths).
    """
    nearest = next((p for p in row if ratio * p.copy_s <= p.compute_copying_s), row[-1])
    tokens = _closed_form(nearest, ratio=ratio)
    if tokens < 1:
        return 0.0, True
    return tokens, row[0].tokens <= tokens <= row[-1].tokens


def _closed_form(point: OverlapPoint, *, ratio: float) -> float:
    """Return ``2 * ((bytes / rate - a) / b - p)`` with one point's rates.

    The result is negative if copies are hidden at any length.
    """
    missing_s = (ratio * point.copy_s - point.products_copying_s) / point.tokens
    mean_context = point.context + point.tokens / 2
    pair_s = point.attention_copying_s / (point.tokens * mean_context)
    return 2 * (missing_s / pair_s - point.context)
