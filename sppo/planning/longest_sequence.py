"""Whether a run fits at all, and the longest sequence with which it does, by bisection."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from itertools import product

from sppo.config.base import MOST_TOKENS
from sppo.config.run import RunConfig
from sppo.hardware.description import HardwareSpec
from sppo.planning.search.choices import Degrees, degrees_to_try
from sppo.planning.search.division import Division
from sppo.planning.search.state_choices import runs_by_tiers
from sppo.units import KIB


def fits_at_all(run: RunConfig, hardware: HardwareSpec) -> bool:
    """Return whether any division of the devices fits, with any N worth trying and any tiers."""
    length = run.sequence.length
    return any(_fits(*way, hardware, length) for way in _ways(run, hardware))


def longest_sequence(run: RunConfig, hardware: HardwareSpec) -> int:
    """Return the longest sequence that fits with the other keys of `run`, in whole Ki tokens.

    Each division of the devices is searched by itself, from the longest sequence so far on: most
    are left after one length.
    """
    count, degree = run.sequence.num_subsequences, run.parallel.sequence_parallel_degree
    least = 1 if count == "auto" else count * degree
    longest = 0
    for way in _ways(run, hardware):
        fits = partial(_fits, *way, hardware)
        longest = max(longest, longest_tokens(fits, least=max(least, longest + 1)))
    return longest


def _ways(run: RunConfig, hardware: HardwareSpec) -> list[tuple[RunConfig, Degrees]]:
    """Return `run` with each choice of tiers, each with every division of the devices.

    Those that need least memory of a device are first.
    """
    try:
        *nearer, farthest = runs_by_tiers(run, hardware=hardware)
        divisions = [
            degrees
            for across_nodes in (False, True)
            for degrees in degrees_to_try(run, hardware=hardware, across_nodes=across_nodes)[0]
        ]
    except ValueError:
        return []
    # Most devices first; of equals, those that also shard the running layer most.
    divisions.sort(key=lambda one: (one.num_devices, one.sequence_parallel), reverse=True)
    # The nearest tiers need least memory of the next tier.
    return [*product((farthest, *nearer), divisions)]


def _fits(run: RunConfig, degrees: Degrees, hardware: HardwareSpec, tokens: int) -> bool:
    """Return whether sequences of `tokens` tokens fit with some tiers and degrees."""
    if tokens != run.sequence.length:  # cuts are written for one length
        run = run.with_values({"sequence.length": tokens, "sequence.boundaries": None})
    try:
        return Division(run, hardware=hardware, degrees=degrees).fits
    except ValueError:
        return False


def longest_tokens(fits: Callable[[int], bool], *, least: int = 1, most: int = MOST_TOKENS) -> int:
    """Return the longest sequence that fits, in whole Ki tokens; 0 if not even the shortest fits.

    Args:
        fits: Function that returns whether a sequence of the given number of tokens fits. It must
            be monotonic: shorter sequences fit if longer ones do.
        least: Minimum tokens of a sequence.
        most: Maximum tokens of a sequence.
    """
    lengths = range(-(-least // KIB), most // KIB + 1)
    if not lengths or not fits(lengths[0] * KIB):
        return 0
    too_long = bisect_left(lengths, True, lo=1, key=lambda length: not fits(length * KIB))
    return lengths[too_long - 1] * KIB
