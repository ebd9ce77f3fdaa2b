"""The longest sequence that fits, found by the same steps whoever asks."""

from __future__ import annotations

from collections.abc import Callable

from sppo.config.run import RunConfig
from sppo.units import KIB

_LONGEST_TOKENS = 1 << 32


def longest_tokens(fits: Callable[[int], bool], *, least: int = 1) -> int:
    """The longest sequence that fits, to whole Ki tokens; 0 where not even the shortest does.

    Args:
        fits: whether a sequence of so many tokens does; a shorter one fits where a longer one does.
        least: tokens that a sequence must have.
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
    """Return `run` with sequences of `tokens`, cut anew if its cuts are for another length."""
    change: dict[str, object] = {"length": tokens}
    if run.sequence.boundaries is not None:
        change["boundaries"] = None
    return run.model_copy(update={"sequence": run.sequence.model_copy(update=change)})
