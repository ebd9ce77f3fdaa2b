"""Best-first branch-and-bound search for the fastest candidates of a request.

The time of retaining everything is a lower bound of every activation policy. Divisions of the
devices are visited in the order of this bound, and so are the numbers of subsequences of each, so
iterating over the first few candidates prices little more than these.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from sppo.config.run import RunConfig
from sppo.hardware.description import HardwareSpec
from sppo.planning.search.candidate_cache import CandidateCache
from sppo.planning.search.candidates import counts_of_degrees, counts_within_limit
from sppo.planning.search.choices import (
    Degrees,
    Refusal,
    degrees_to_try,
    likeliest_to_fit,
    virtual_stages_to_try,
)
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.memory_bounds import least_shortfall
from sppo.planning.search.ranking import Rank, rank_of, rounded
from sppo.planning.search.shortfall import Shortfall
from sppo.planning.search.subsequence_search import SubsequenceSearch

WORTH_IT = 0.99
"""Fraction of the step time at or below which another schedule is preferred. Predictions are not
exact enough for smaller gains to count, and simpler programs are better to run."""
_FEW = 4
"""Number of values of N that are tried with several stages on a rank."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Degrees that do not fit or cannot work.

    Attributes:
        degrees: Rejected degrees.
        num_subsequences: N that came nearest to fitting, or has the lowest bound; None if memory
            was not the reason.
        policy: Activation policy that came nearest to fitting; None if memory was not the reason,
            or no policy can fit.
        virtual_stages: Stages on each rank that came nearest to fitting, or have the lowest bound.
        reason: Reason as text.
        shortfall: Shortfall of this candidate; None if memory was not the reason.
        steps: Whether a step of the longest samples fits, but one drawn from the corpus does not.
    """

    degrees: Degrees
    reason: str
    num_subsequences: int | None = None
    policy: str | None = None
    shortfall: Shortfall | None = None
    virtual_stages: int = 1
    steps: bool = False


class CandidateSearch:
    """Search over all candidates of a request on a machine.

    Args:
        run: Validated run configuration.
        hardware: Description of the machine.
        subsequence_counts: Values of N to try; () for all worth trying.

    Raises:
        ValueError: The degrees of the run need more devices than the machine has.
    """

    def __init__(
        self,
        run: RunConfig,
        *,
        hardware: HardwareSpec,
        subsequence_counts: Sequence[int] = (),
    ) -> None:
        possible, self._refused = degrees_to_try(run, hardware=hardware)
        self._searches: dict[Degrees, _DegreesSearch] = {}
        for degrees in possible:
            counts, problem = counts_of_degrees(
                run, hardware=hardware, degrees=degrees, counts=subsequence_counts
            )
            if counts:
                self._searches[degrees] = _DegreesSearch(
                    run, hardware=hardware, degrees=degrees, counts=counts
                )
            else:
                self._refused.append(Refusal(degrees, problem))

    def fastest_first(self, *, most_s: float = math.inf) -> Iterator[EvaluatedCandidate]:
        """Yield the best candidate that fits of each division of the devices, fastest first.

        Args:
            most_s: Upper bound of the step time: divisions whose lower bound exceeds this are
                skipped.
        """
        heap: list[tuple[Rank, int, _DegreesSearch, EvaluatedCandidate | None]] = [
            ((rounded(search.quick_bound_s), 0, 0, 0, 0), place, search, None)
            for place, search in enumerate(self._searches.values())
            if search.may_take(most_s) and search.may_fit
        ]
        heapq.heapify(heap)
        while heap:
            key, place, search, found = heapq.heappop(heap)
            if found is not None:
                yield found
            elif key[0] < (bound_s := rounded(search.bound_s)):
                heapq.heappush(heap, ((bound_s, 0, 0, 0, 0), place, search, None))
            elif search.best.shortfall is None:
                heapq.heappush(heap, (rank_of(search.best), place, search, search.best))

    def refined(self, found: EvaluatedCandidate, *, below: float = math.inf) -> EvaluatedCandidate:
        """Return the best candidate with the degrees of `found` and N chosen by simulation.

        Args:
            found: Candidate found by the closed form, simulated or not.
            below: Step time in seconds; only values of N that may be faster are simulated.
        """
        return self._searches[found.degrees].refined(found, below=below)

    def by_num_subsequences(
        self, degrees: Degrees, *, virtual_stages: int
    ) -> tuple[EvaluatedCandidate, ...]:
        """Return the candidates that fit with given degrees and virtual stages, by N."""
        found = self._searches[degrees].every_candidate(virtual_stages)
        return tuple(evaluated for evaluated in found if evaluated.shortfall is None)

    def rejections(self, *, exact: bool) -> tuple[Rejection, ...]:
        """Return the divisions of the devices that do not fit or cannot work.

        Args:
            exact: Whether to evaluate divisions that cannot fit under any placement of activations,
                or to give a lower bound of what they lack, which takes less time.
        """
        refused = [Rejection(refusal.degrees, refusal.reason) for refusal in self._refused]
        short = [search for search in self._searches.values() if not search.fits]
        return (
            *refused,
            *(
                rejection_of(search.best) if exact or search.may_fit else search.least_rejection()
                for search in short
            ),
        )


def best_of_degrees(
    run: RunConfig, *, hardware: HardwareSpec, degrees: Degrees
) -> EvaluatedCandidate:
    """Return the fastest candidate that fits with given degrees, over N and virtual stages.

    If none fits, return the candidate that lacks least memory.

    Raises:
        ValueError: Subsequences have fewer tokens than ranks need, for every N.
    """
    counts, problem = counts_of_degrees(run, hardware=hardware, degrees=degrees)
    if not counts:
        raise ValueError(problem)
    search = _DegreesSearch(run, hardware=hardware, degrees=degrees, counts=counts)
    return search.refined(search.best)


class _DegreesSearch:
    """Search within one division of the devices, over virtual stages and subsequences.

    Several stages on a rank are tried only if they may be faster by enough, or if one stage does
    not fit.
    """

    def __init__(
        self, run: RunConfig, *, hardware: HardwareSpec, degrees: Degrees, counts: Sequence[int]
    ) -> None:
        self._run, self._hardware, self._degrees = run, hardware, degrees
        self._tries_few = len(likeliest_to_fit(counts, hardware=hardware)) == 1
        self._simplest, *further = virtual_stages_to_try(run, num_ranks=degrees.pipeline_parallel)
        self._counts = {
            virtual: counts_within_limit(
                run, counts=counts, degrees=degrees, virtual_stages=virtual
            )
            for virtual in (self._simplest, *further)
        }
        self._further = [virtual for virtual in further if self._counts[virtual]]
        self._searches: dict[tuple[int, tuple[int, ...]], SubsequenceSearch] = {}
        self._caches: dict[int, CandidateCache] = {}

    @property
    def may_fit(self) -> bool:
        """True if any candidate may fit."""
        return any(self._search(virtual).may_fit for virtual in (self._simplest, *self._further))

    def may_take(self, most_s: float) -> bool:
        """Return whether any candidate may take at most `most_s` seconds."""
        return most_s == math.inf or (self.quick_bound_s <= most_s and self.bound_s <= most_s)

    @cached_property
    def quick_bound_s(self) -> float:
        """Lower bound of `bound_s` that takes less time to compute."""
        return self._search(self._simplest).quick_bound_s

    @cached_property
    def bound_s(self) -> float:
        """Lower bound of the step time of all candidates, whether they fit or not."""
        search = self._search(self._simplest)
        if not self._further:
            return search.bound_s
        return min(search.bound_s, search.looped_bound_s(max(self._further)))

    @cached_property
    def best(self) -> EvaluatedCandidate:
        """Fastest candidate that fits; if none fits, the one that lacks least memory.

        Larger numbers of stages on a rank are tried first: they idle least and hold the least
        gradients of K and V. Smaller numbers replace them only if they are faster.
        """
        simplest = self._search(self._simplest)
        if self._further and not simplest.may_fit:
            most_stages = self._best_that_fits(self._further[-1])
            if simplest.least_short_bytes > most_stages.short_bytes:
                return most_stages
        best = simplest.best
        for virtual in reversed(self._further):
            if best.shortfall is not None:
                # If the most stages do not fit, fewer stages do not fit either.
                return min(best, self._best_that_fits(virtual), key=_short_first)
            counts = self._counts_beside(best, virtual)
            found = self._faster(self._search(virtual, counts=counts), than=best)
            best = found or best
        return best

    def refined(self, found: EvaluatedCandidate, *, below: float = math.inf) -> EvaluatedCandidate:
        """Return `found`, or a candidate with another N that simulates faster.

        Only values of N that may take less than `below` seconds are simulated.
        """
        if found.shortfall is not None:
            return found
        return self._search(found.candidate.virtual_stages).refined(found, below=below)

    def least_rejection(self) -> Rejection:
        """Return the rejection of degrees that cannot fit, with a lower bound of what they lack."""
        searches = [self._search(virtual) for virtual in (self._simplest, *self._further)]
        nearest = min(searches, key=lambda search: search.least_short_bytes)
        shortfall = least_shortfall(nearest.likeliest)
        return Rejection(
            self._degrees,
            shortfall.reason,
            num_subsequences=len(nearest.likeliest.lengths),
            shortfall=shortfall,
            virtual_stages=nearest.virtual_stages,
        )

    @property
    def fits(self) -> bool:
        """True if any candidate fits."""
        if "best" in self.__dict__:
            return self.best.shortfall is None
        return self._search(self._simplest).fits or (
            bool(self._further)
            and self._search(self._further[-1], counts=self._few_likeliest(self._further[-1])).fits
        )

    def _few_likeliest(self, virtual_stages: int) -> Sequence[int]:
        """Return the few values of N that are likeliest to fit, or all if any may be."""
        counts = self._counts[virtual_stages]
        return counts[-_FEW:] if self._tries_few else counts

    def _best_that_fits(self, virtual_stages: int) -> EvaluatedCandidate:
        """Return the best candidate with `virtual_stages`; few subsequences may not fit.

        First the few values of N that are likeliest to fit are tried. If any fits, all values of N
        from the smallest that fits are tried.
        """
        counts, few = self._counts[virtual_stages], self._few_likeliest(virtual_stages)
        found = self._search(virtual_stages, counts=few).best
        if found.shortfall is not None or few == counts:
            return found
        cache = self._caches[virtual_stages]
        first = bisect_left(counts, True, key=cache.fits)
        return self._search(virtual_stages, counts=counts[first:]).best

    def _faster(
        self, search: SubsequenceSearch, *, than: EvaluatedCandidate
    ) -> EvaluatedCandidate | None:
        """Return the best candidate of a search if faster than `than` by enough; else None."""
        least_s = self._search(self._simplest).looped_bound_s(search.virtual_stages)
        most_s = than.time.step_s * WORTH_IT
        if least_s > most_s or not search.may_fit or search.bound_s > most_s:
            return None
        found = search.best
        return found if found.shortfall is None and found.time.step_s <= most_s else None

    def _counts_beside(self, found: EvaluatedCandidate, virtual_stages: int) -> Sequence[int]:
        """Return the values of N to try with `virtual_stages`, given the best candidate so far.

        Fewer subsequences suffice to fill a pipeline that each subsequence passes several times.
        """
        most = len(found.candidate.lengths) * found.candidate.virtual_stages
        least = most // virtual_stages
        allowed = self._counts[virtual_stages]
        counts = [n for n in allowed if least <= n <= most] or [allowed[-1]]
        last = len(counts) - 1
        return sorted({counts[last * step // (_FEW - 1)] for step in range(_FEW)})

    def every_candidate(self, virtual_stages: int) -> list[EvaluatedCandidate]:
        """Return the candidates with `virtual_stages`, by N, without cut units (MSP)."""
        return self._search(virtual_stages).every_candidate()

    def _search(self, virtual_stages: int, *, counts: Sequence[int] = ()) -> SubsequenceSearch:
        """Return the search with `virtual_stages`, over `counts` or, if empty, over every N."""
        if virtual_stages not in self._caches:
            self._caches[virtual_stages] = CandidateCache(
                self._run,
                hardware=self._hardware,
                degrees=self._degrees,
                virtual_stages=virtual_stages,
            )
        key = virtual_stages, tuple(counts or self._counts[virtual_stages])
        if key not in self._searches:
            self._searches[key] = SubsequenceSearch(self._caches[virtual_stages], counts=key[1])
        return self._searches[key]


def _short_first(evaluated: EvaluatedCandidate) -> tuple[int, float]:
    """Return a sort key: candidates that fit come first, by time; the others by missing memory."""
    if evaluated.shortfall is None:
        return 0, evaluated.time.step_s
    return evaluated.short_bytes, 0.0


def rejection_of(nearest: EvaluatedCandidate) -> Rejection:
    """Return the rejection of degrees of which even the nearest candidate does not fit."""
    assert nearest.shortfall is not None, "only made of what does not fit"
    candidate = nearest.candidate
    return Rejection(
        nearest.degrees,
        nearest.shortfall.reason,
        num_subsequences=len(candidate.lengths),
        policy=candidate.policy,
        shortfall=nearest.shortfall,
        virtual_stages=candidate.virtual_stages,
    )
