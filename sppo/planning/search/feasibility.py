"""Feasibility and approximate speed of a run: the solver's closed forms with few values of N.

Advice and comparisons call this many times, so it is much faster than `solve`.
"""

from __future__ import annotations

from sppo.config.run import RunConfig
from sppo.hardware.description import HardwareSpec
from sppo.planning.longest_sequence import longest_tokens, with_length
from sppo.planning.search.candidate_search import CandidateSearch
from sppo.planning.search.candidates import (
    candidate_of_subsequences,
    counts_of_degrees,
    counts_within_limit,
)
from sppo.planning.search.choices import (
    Degrees,
    degrees_to_try,
    likeliest_to_fit,
    subsequence_counts_to_try,
    virtual_stages_to_try,
)
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.planning.search.memory_bounds import may_fit
from sppo.planning.search.state_choices import runs_by_tiers


def quick_best(run: RunConfig, hardware: HardwareSpec) -> EvaluatedCandidate | None:
    """Return the best candidate in closed form, within a few percent; None if nothing fits.

    Also None for requests that cannot work at all, such as more subsequences than tokens: callers
    vary requests and try many that cannot.
    """
    if not fits_at_all(run, hardware):
        return None
    counts = _few(subsequence_counts_to_try(run, hardware=hardware))
    for attempt in runs_by_tiers(run, hardware=hardware):
        search = CandidateSearch(attempt, hardware=hardware, subsequence_counts=counts)
        found = next(search.fastest_first(), None)
        if found is not None:
            return found
    return None


def fits_at_all(run: RunConfig, hardware: HardwareSpec) -> bool:
    """Return whether any division of the devices fits, with any N worth trying and any tiers."""
    try:
        attempts = runs_by_tiers(run, hardware=hardware)
    except ValueError:
        return False
    # The last attempt needs least device memory, the first least memory of the next tier.
    return any(_fits(attempt, hardware) for attempt in (attempts[-1], *attempts[:-1]))


def _fits(run: RunConfig, hardware: HardwareSpec) -> bool:
    """Return whether any division of the devices fits, with the tiers that the run names."""
    try:
        possible, _ = degrees_to_try(run, hardware=hardware)
        # Most devices first; of equals, those that also shard the running layer most.
        possible.sort(key=lambda d: (d.num_devices, d.sequence_parallel), reverse=True)
        candidates = (
            candidate_of_subsequences(
                run,
                hardware=hardware,
                degrees=degrees,
                num_subsequences=num_subsequences,
                virtual_stages=virtual_stages,
            )
            for degrees in possible
            for counts in (counts_of_degrees(run, hardware=hardware, degrees=degrees)[0],)
            for virtual_stages in _fewest_and_most(run, degrees)
            for allowed in (
                counts_within_limit(
                    run, counts=counts, degrees=degrees, virtual_stages=virtual_stages
                ),
            )
            for num_subsequences in reversed(likeliest_to_fit(allowed, hardware=hardware))
        )
        return any(
            may_fit(candidate) and evaluate_candidate(candidate).shortfall is None
            for candidate in candidates
        )
    except ValueError:
        return False


def longest_sequence(run: RunConfig, hardware: HardwareSpec) -> int:
    """Return the longest sequence that fits with the other keys of `run`, in whole Ki tokens."""
    count, degree = run.sequence.num_subsequences, run.parallel.sequence_parallel_degree
    least = 1 if count == "auto" else count * degree
    return longest_tokens(
        lambda tokens: fits_at_all(with_length(run, tokens), hardware), least=least
    )


def _fewest_and_most(run: RunConfig, degrees: Degrees) -> tuple[int, ...]:
    """Return the fewest and the most stages on a rank; the most hold least gradients of K and V."""
    virtual = virtual_stages_to_try(run, num_ranks=degrees.pipeline_parallel)
    return tuple(dict.fromkeys((virtual[0], virtual[-1])))


def _few(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first and last of `counts` and two of its lower half, where the best often is."""
    last = len(counts) - 1
    return tuple(counts[place] for place in sorted({0, last // 4, last // 2, last}))
