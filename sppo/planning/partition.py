"""Cutting a sequence into subsequences of equal tokens or equal causal FLOPs.

The cost of the first x tokens of a causal sequence is ``a*x + b*x^2/2``: ``a`` FLOPs per token in
the projections, ``b`` FLOPs per (query, key) pair in attention. Boundaries of equal costs then have
the closed form ``x_k = (sqrt(a^2 + 2 b C k / N) - a) / b``, with C the cost of the whole sequence.
Boundaries are rounded, not lengths, so rounding errors do not accumulate.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise
from math import sqrt


def boundaries_by_length(
    length: int, *, num_subsequences: int, alignment: int = 1
) -> tuple[int, ...]:
    """Return N+1 cuts from 0 to ``length`` with equal tokens between them.

    Raises:
        ValueError: There are more subsequences than tokens.
    """
    return _aligned(
        [length * k / num_subsequences for k in range(1, num_subsequences)], length, alignment
    )


@lru_cache(maxsize=256)
def boundaries_by_flops(
    length: int, *, num_subsequences: int, linear: float, quadratic: float, alignment: int = 1
) -> tuple[int, ...]:
    """Return N+1 cuts from 0 to ``length`` with equal causal FLOPs between them.

    Args:
        length: S, tokens of the sequence.
        num_subsequences: N, number of subsequences.
        linear: A, FLOPs per token.
        quadratic: B, FLOPs per visible (query, key) pair.
        alignment: Cuts are multiples of this number; it is halved until no subsequence is empty.

    Raises:
        ValueError: There are more subsequences than tokens.
    """
    if quadratic == 0:
        return boundaries_by_length(length, num_subsequences=num_subsequences, alignment=alignment)
    total = linear * length + quadratic * length**2 / 2
    cuts = [
        (sqrt(linear**2 + 2 * quadratic * total * k / num_subsequences) - linear) / quadratic
        for k in range(1, num_subsequences)
    ]
    return _aligned(cuts, length, alignment)


@lru_cache(maxsize=256)
def lengths_of(boundaries: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens of each subsequence between the cuts of a sequence."""
    return tuple(b - a for a, b in pairwise(boundaries))


def boundaries_of(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Return the cuts of a sequence, from 0 to its length, from its subsequence lengths."""
    return (0, *accumulate(lengths))


def _aligned(cuts: list[float], length: int, alignment: int) -> tuple[int, ...]:
    """Round inner ``cuts`` to multiples of ``alignment``, halved until no subsequence is empty."""
    num_subsequences = len(cuts) + 1
    if num_subsequences > length:
        raise ValueError(
            f"{num_subsequences} subsequences of a {length}-token sequence leave some without a "
            f"token; use at most {length}"
        )
    while True:
        rounded = [0, *(round(cut / alignment) * alignment for cut in cuts), length]
        if all(a < b for a, b in pairwise(rounded)):
            return tuple(rounded)
        if alignment == 1:
            return _spread(rounded, length)
        alignment //= 2


def _spread(cuts: list[int], length: int) -> tuple[int, ...]:
    """Return ``cuts`` with coinciding cuts moved at least one token apart, within [0, length]."""
    spread = list(cuts)
    for k in range(1, len(spread) - 1):
        spread[k] = max(spread[k], spread[k - 1] + 1)
    for k in range(len(spread) - 2, 0, -1):
        spread[k] = min(spread[k], spread[k + 1] - 1)
    assert (spread[0], spread[-1]) == (0, length), "outer boundaries never move"
    return tuple(spread)
