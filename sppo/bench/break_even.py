"""The subsequence length from which on a copy hides behind the compute it runs along with.

For a subsequence of c tokens after p others, copying takes ``c * bytes / rate``; compute takes
``c * a`` for products and ``c * (p + c / 2) * b`` for attention. Both sides grow with c, so what
decides is the mean context ``p + c / 2``: a copy hides from
``c = 2 * ((bytes / rate - a) / b - p)`` tokens on, everywhere once ``p`` alone is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OverlapPoint:
    """One unit alone, its copy alone, and both; medians over rounds, seconds per unit.

    Attributes:
        tokens: Of the subsequence.
        context: Tokens before it.
        moved_bytes: Everything one layer saves for it.
        products_s: Products with weights, alone.
        attention_s: Attention, alone.
        copy_s: Copying the bytes with nothing computed.
        products_copying_s: Products while copies run.
        attention_copying_s: Attention while copies run.
        exposed_s: Compute waiting for copies.
        spread: Between the fastest and the slowest round of a unit with copies, over the median.
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
        """The unit alone."""
        return self.products_s + self.attention_s

    @property
    def compute_copying_s(self) -> float:
        """The unit while copies run, waiting not counted."""
        return self.products_copying_s + self.attention_copying_s

    @property
    def slowdown(self) -> float:
        """Fraction by which copies slow the compute they run behind; noise goes below 0."""
        return self.compute_copying_s / self.compute_s - 1


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Shortest subsequence at one context whose copy hides.

    Attributes:
        context: Tokens before it.
        everything_tokens: For everything a layer saves; 0 where any length hides.
        kept_tokens: For the layer's input and attention's output alone; 0 where any length hides.
        everything_measured: Whether the first lies between lengths that were measured, not beyond.
        kept_measured: The same of the second.
    """

    context: int
    everything_tokens: float
    kept_tokens: float
    everything_measured: bool
    kept_measured: bool


def break_evens(points: Sequence[OverlapPoint], *, kept_ratio: float) -> tuple[BreakEven, ...]:
    """Break-even lengths at every context that was measured.

    Args:
        points: timings.
        kept_ratio: bytes of a layer's input and attention's output over all it saves.
    """
    found = []
    for context in sorted({point.context for point in points}):
        row = sorted((p for p in points if p.context == context), key=lambda p: p.tokens)
        everything, is_measured = break_even_tokens(row, ratio=1.0)
        kept, kept_measured = break_even_tokens(row, ratio=kept_ratio)
        found.append(BreakEven(context, everything, kept, is_measured, kept_measured))
    return tuple(found)


def break_even_tokens(row: Sequence[OverlapPoint], *, ratio: float) -> tuple[float, bool]:
    """Break-even length at one context, and whether it lies between measured lengths.

    Args:
        row: timings at that context, shortest first.
        ratio: fraction of the bytes that is copied.

    Returns:
        (tokens, 0 where any length hides; whether measured lengths enclose it).
    """
    # Per token, for that grows evenly with the length.
    late = [(ratio * p.copy_s - p.compute_copying_s) / p.tokens for p in row]
    if late[0] <= 0:  # shorter ones than were measured may not hide, if their mean context decides
        tokens = _closed_form(row[0], ratio=ratio)
        return (tokens, False) if 1 <= tokens < row[0].tokens else (0.0, True)
    for index in range(1, len(row)):
        if late[index] <= 0:
            before, here = row[index - 1], row[index]
            part = late[index - 1] / (late[index - 1] - late[index])
            return before.tokens + part * (here.tokens - before.tokens), True
    return max(float(row[-1].tokens), _closed_form(row[-1], ratio=ratio)), False


def _closed_form(point: OverlapPoint, *, ratio: float) -> float:
    """Return ``2 * ((bytes / rate - a) / b - p)`` with one point's rates; below 0 if all hide."""
    missing_s = (ratio * point.copy_s - point.products_copying_s) / point.tokens
    mean_context = point.context + point.tokens / 2
    pair_s = point.attention_copying_s / (point.tokens * mean_context)
    return 2 * (missing_s / pair_s - point.context)
