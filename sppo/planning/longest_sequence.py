"""Whether a run fits at all, and the longest sequence with which it does, by bisection."""

from __future__ import annotations

from collections.abc import Callable

from sppo.config.run import RunConfig
from sppo.hardware.description import HardwareSpec
from sppo.planning.search.division import divide
from sppo.planning.search.state_choices import runs_by_tiers
from sppo.units import KIB

_LONGEST_TOKENS = 1 << 32


def fits_at_all(run: RunConfig, hardware: HardwareSpec) -> bool:
    """Return whether any division of the devices fits, with any N worth trying and any tiers."""
    try:
        attempts = runs_by_tiers(run, hardware=hardware)
        # The last attempt needs least device memory, the first least memory of the next tier.
        return any(_fits(attempt, hardware) for attempt in (attempts[-1], *attempts[:-1]))
    except ValueError:
        return False


def _fits(run: RunConfig, hardware: HardwareSpec) -> bool:
    """Return whether any division of the devices fits, with the tiers that the run names."""
    divisions = [
        division
        for across_nodes in (False, True)
        for division in divide(run, hardware=hardware, across_nodes=across_nodes)[0]
    ]
    # Most devices first; of equals, those that also shard the running layer most.
    divisions.sort(
        key=lambda one: (one.degrees.num_devices, one.degrees.sequence_parallel), reverse=True
    )
    return any(division.fits for division in divisions)


def longest_sequence(run: RunConfig, hardware: HardwareSpec) -> int:
    """Return the longest sequence that fits with the other keys of `run`, in whole Ki tokens."""
    count, degree = run.sequence.num_subsequences, run.parallel.sequence_parallel_degree
    least = 1 if count == "auto" else count * degree
    return longest_tokens(
        lambda tokens: fits_at_all(with_length(run, tokens), hardware), least=least
    )


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
