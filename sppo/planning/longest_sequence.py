"""Length of the longest sequence that fits, found by bisection."""

from __future__ import annotations

from collections.abc import Callable

from sppo.config.run import RunConfig
from sppo.units import KIB

_LONGEST_TOKENS = 1 << 32


def longest_tokens(fits: Callable[[int], bool], *, least: int = 1) -> int:
    """Return the longest sequence that fits, in whole Ki tokens; 0 if not even the shortest fits.

    Args:
        fits: Function that returns whether a sequence of the given number of tokens fits. It must
            be monotonic: shorter sequences fit if longer ones do.
        least: Minimum tokens of a sequence.
    """
    low = -(-least // KIB)
    if not fits(low * KIB):
        return 0
    while low * KIB < _LONGEST_TOKENS and fits(2 * low * KIB):
        low *= 2
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * KIB) else (low, middle)
    return low * KIB


def with_length(run: RunConfig, tokens: int) -> RunConfig:
    """Return `run` with sequences of `tokens` tokens, without cuts written for another length."""
    change: dict[str, object] = {"length": tokens}
    if run.sequence.boundaries is not None:
        change["boundaries"] = None
    return run.model_copy(update={"sequence": run.sequence.model_copy(update=change)})
