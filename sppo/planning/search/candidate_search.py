"""Best-first branch-and-bound search for the fastest candidates of a request.

The time of retaining everything is a lower bound of every activation policy. Divisions of the
devices are visited in the order of this bound, and so are the numbers of subsequences of each, so
iterating over the first few candidates prices little more than these.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sppo.config.run import RunConfig
from sppo.cost.candidate import Candidate
from sppo.cost.stage_cost import StageSeconds, mean_work_seconds, stage_seconds
from sppo.hardware.description import HardwareSpec
from sppo.planning.search.candidates import candidate_of_subsequences, counts_of_degrees
from sppo.planning.search.choices import (
    Degrees,
    Refusal,
    degrees_to_try,
    likeliest_to_fit,
    virtual_stages_to_try,
)
from sppo.planning.search.evaluated_candidate import (
    EvaluatedCandidate,
    any_that_fits,
    evaluate_candidate,
)
from sppo.planning.search.memory_bounds import least_short_bytes, least_shortfall, leaves_room
from sppo.planning.search.shortfall import Shortfall
from sppo.planning.search.simulated_candidate import is_quick, simulated_if_inexact
from sppo.planning.search.step_prices import least_seconds

WORTH_IT = 0.99
"""Fraction of the step time at or below which another schedule is preferred. Predictions are not
exact enough for smaller gains to count, and simpler programs are better to run."""
_ROUNDING = 1e-9
"""Relative margin for the rounding of sums of seconds."""
_FEW = 4
"""Number of values of N that are tried with several stages on a rank."""
Rank = tuple[float, int, int, int, int]


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
    """

    degrees: Degrees
    reason: str
    num_subsequences: int | None = None
    policy: str | None = None
    shortfall: Shortfall | None = None
    virtual_stages: int = 1


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
            ((_rounded(search.quick_bound_s), 0, 0, 0, 0), place, search, None)
            for place, search in enumerate(self._searches.values())
            if search.may_take(most_s) and search.may_fit
        ]
        heapq.heapify(heap)
        while heap:
            key, place, search, found = heapq.heappop(heap)
            if found is not None:
                yield found
            elif key[0] < (bound_s := _rounded(search.bound_s)):
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


def rank_of(evaluated: EvaluatedCandidate) -> Rank:
    """Return the sort key of a candidate: step time, then devices, ranks, stages, subsequences."""
    degrees = evaluated.degrees
    return (
        _rounded(evaluated.step_s),
        degrees.num_devices,
        degrees.pipeline_parallel,
        evaluated.candidate.virtual_stages,
        len(evaluated.candidate.lengths),
    )


class _DegreesSearch:
    """Search within one division of the devices, over virtual stages and subsequences.

    Several stages on a rank are tried only if they may be faster by enough, or if one stage does
    not fit.
    """

    def __init__(
        self, run: RunConfig, *, hardware: HardwareSpec, degrees: Degrees, counts: Sequence[int]
    ) -> None:
        self._run, self._hardware, self._degrees = run, hardware, degrees
        self._counts = counts
        is_last = len(likeliest_to_fit(counts, hardware=hardware)) == 1
        self._few_likeliest = counts[-_FEW:] if is_last else counts
        self._simplest, *self._further = virtual_stages_to_try(
            run, num_ranks=degrees.pipeline_parallel
        )
        self._searches: dict[tuple[int, tuple[int, ...]], _SubsequenceSearch] = {}
        self._caches: dict[int, _CandidateCache] = {}

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
            bool(self._further) and self._search(self._further[-1], counts=self._few_likeliest).fits
        )

    def _best_that_fits(self, virtual_stages: int) -> EvaluatedCandidate:
        """Return the best candidate with `virtual_stages`; few subsequences may not fit.

        First the few values of N that are likeliest to fit are tried. If any fits, all values of N
        from the smallest that fits are tried.
        """
        found = self._search(virtual_stages, counts=self._few_likeliest).best
        if found.shortfall is not None or self._few_likeliest == self._counts:
            return found
        cache = self._caches[virtual_stages]
        first = bisect_left(self._counts, True, key=cache.fits)
        return self._search(virtual_stages, counts=self._counts[first:]).best

    def _faster(
        self, search: _SubsequenceSearch, *, than: EvaluatedCandidate
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
        counts = [n for n in self._counts if least <= n <= most] or [self._counts[-1]]
        last = len(counts) - 1
        return sorted({counts[last * step // (_FEW - 1)] for step in range(_FEW)})

    def every_candidate(self, virtual_stages: int) -> list[EvaluatedCandidate]:
        """Return the candidates with `virtual_stages`, by N, without cut units (MSP)."""
        return self._search(virtual_stages).every_candidate()

    def _search(self, virtual_stages: int, *, counts: Sequence[int] = ()) -> _SubsequenceSearch:
        """Return the search with `virtual_stages`, over `counts` or, if empty, over every N."""
        if virtual_stages not in self._caches:
            self._caches[virtual_stages] = _CandidateCache(
                self._run,
                hardware=self._hardware,
                degrees=self._degrees,
                virtual_stages=virtual_stages,
            )
        key = virtual_stages, tuple(counts or self._counts)
        if key not in self._searches:
            self._searches[key] = _SubsequenceSearch(self._caches[virtual_stages], counts=key[1])
        return self._searches[key]


class _CandidateCache:
    """Cache of the candidates of one division of devices and layers, and of their evaluations.

    Candidates are looked up by N; each is made and evaluated once.
    """

    def __init__(
        self, run: RunConfig, *, hardware: HardwareSpec, degrees: Degrees, virtual_stages: int
    ) -> None:
        self._run, self._degrees = run, degrees
        self.hardware, self.virtual_stages = hardware, virtual_stages
        self._candidates: dict[int, Candidate] = {}
        self._seconds: dict[int, StageSeconds] = {}
        self._evaluated: dict[tuple[int, str], EvaluatedCandidate] = {}
        self._fits: dict[int, bool] = {}

    def candidate(self, num_subsequences: int) -> Candidate:
        """Return the candidate with `num_subsequences` subsequences."""
        if num_subsequences not in self._candidates:
            self._candidates[num_subsequences] = candidate_of_subsequences(
                self._run,
                hardware=self.hardware,
                degrees=self._degrees,
                num_subsequences=num_subsequences,
                virtual_stages=self.virtual_stages,
            )
        return self._candidates[num_subsequences]

    def seconds(self, num_subsequences: int) -> StageSeconds:
        """Return the seconds of the candidate's units with everything retained."""
        if num_subsequences not in self._seconds:
            self._seconds[num_subsequences] = stage_seconds(self.candidate(num_subsequences))
        return self._seconds[num_subsequences]

    def evaluated(self, num_subsequences: int) -> EvaluatedCandidate:
        """Return the evaluated candidate with `num_subsequences` subsequences."""
        return self._evaluate(self.candidate(num_subsequences))

    def simulated_if_inexact(self, num_subsequences: int) -> EvaluatedCandidate:
        """Return the evaluated candidate, simulated if its closed form may be inexact.

        The candidate must fit.
        """
        evaluated = simulated_if_inexact(self.evaluated(num_subsequences))
        self._evaluated[num_subsequences, evaluated.candidate.schedule] = evaluated
        return evaluated

    def without_msp(self, num_subsequences: int) -> EvaluatedCandidate:
        """Return the evaluated candidate without cut units: under MSP, as if no unit were cut.

        Choosing the units to cut (MSP) takes a search. The closed form of the time and the memory
        without saved activations are the same with and without cut units.
        """
        return self._evaluate(self._candidate_without_msp(num_subsequences))

    def fits(self, num_subsequences: int) -> bool:
        """Return whether the candidate fits without cut units (MSP)."""
        candidate = self._candidate_without_msp(num_subsequences)
        key = num_subsequences, candidate.schedule
        if key in self._evaluated:
            return self._evaluated[key].shortfall is None
        if num_subsequences not in self._fits:
            found = any_that_fits(candidate, seconds=self.seconds(num_subsequences))
            self._fits[num_subsequences] = found.shortfall is None
            if found.shortfall is not None:
                self._evaluated[key] = found
        return self._fits[num_subsequences]

    def seems_to_fit(self, num_subsequences: int) -> bool:
        """Return whether it fits with whole units; True, too, if that takes long to tell."""
        if self.rules_out_fewer(num_subsequences, if_known=True):
            return False
        return leaves_room(self.candidate(num_subsequences)) or self.fits(num_subsequences)

    def rules_out_fewer(self, num_subsequences: int, *, if_known: bool = False) -> bool:
        """Return whether fewer subsequences cannot fit either, as device memory is short for these.

        Host memory of a fixed offload ratio grows with N, since the last subsequence is not
        offloaded, and what a rank holds under MSP depends on its program: False for these.

        Args:
            num_subsequences: Number of subsequences.
            if_known: Whether to return False instead of evaluating a candidate.
        """
        candidate = self.candidate(num_subsequences)
        key = num_subsequences, candidate.schedule
        if candidate.schedule == "sppo_msp" or (if_known and key not in self._evaluated):
            return False
        shortfall = self._evaluate(candidate).shortfall
        return shortfall is not None and shortfall.place == "device"

    def _candidate_without_msp(self, num_subsequences: int) -> Candidate:
        candidate = self.candidate(num_subsequences)
        cuts = candidate.schedule != candidate.order
        return replace(candidate, schedule=candidate.order) if cuts else candidate

    def _evaluate(self, candidate: Candidate) -> EvaluatedCandidate:
        num_subsequences = len(candidate.lengths)
        key = num_subsequences, candidate.schedule
        if key not in self._evaluated:
            self._evaluated[key] = evaluate_candidate(
                candidate, seconds=self.seconds(num_subsequences)
            )
        return self._evaluated[key]


class _SubsequenceSearch:
    """Search within one division of devices and layers, over numbers of subsequences."""

    def __init__(self, candidates: _CandidateCache, *, counts: Sequence[int]) -> None:
        self._candidates, self._counts = candidates, counts
        self._likeliest = likeliest_to_fit(counts, hardware=candidates.hardware)
        self.virtual_stages = candidates.virtual_stages

    @cached_property
    def may_fit(self) -> bool:
        """True if any candidate may fit, for any placement of saved activations."""
        return self.least_short_bytes <= 0

    @cached_property
    def least_short_bytes(self) -> int:
        """Lower bound of the bytes that every candidate lacks; 0 or less if one may fit."""
        return least_short_bytes(self.likeliest)

    @cached_property
    def likeliest(self) -> Candidate:
        """Candidate with the lowest bound of the bytes that it lacks."""
        return min(map(self._candidates.candidate, self._likeliest), key=least_short_bytes)

    @cached_property
    def _worth_trying(self) -> Sequence[int]:
        """Values of N to try: all if the likeliest to fit may fit, otherwise the last."""
        if len(self._likeliest) == len(self._counts):
            return self._counts
        last = self._counts[-1]
        return self._counts if self._candidates.seems_to_fit(last) else self._counts[-1:]

    @property
    def quick_bound_s(self) -> float:
        """Lower bound of `bound_s` and of `looped_bound_s` that takes less time to compute."""
        candidates = map(self._candidates.candidate, self._counts)
        return min(map(mean_work_seconds, candidates)) * (1 - _ROUNDING)

    @property
    def bound_s(self) -> float:
        """Lower bound of the step time of all candidates, whether they fit or not."""
        return self._bounds[0][0]

    def looped_bound_s(self, virtual_stages: int) -> float:
        """Return an approximate lower bound of the step time with several stages on each rank."""
        return min(work_s + ramp_s / virtual_stages for work_s, ramp_s in self._work)

    @cached_property
    def best(self) -> EvaluatedCandidate:
        """Fastest candidate that fits; if none fits, the one that lacks least memory."""
        if not self.may_fit:
            return self._candidates.without_msp(self._counts[-1])
        if len(self._worth_trying) == 1:
            return self._candidates.evaluated(self._worth_trying[0])
        best = nearest = None
        for bound_s, num_subsequences in self._bounds:
            if best is not None and bound_s > best.time.step_s:
                break
            if best is not None and self._is_slower_cut(num_subsequences, than=best):
                continue
            evaluated = self._candidates.evaluated(num_subsequences)
            if evaluated.shortfall is None:
                best = min(best or evaluated, evaluated, key=rank_of)
                continue
            if best is None and nearest is None and len(self._likeliest) == 1:
                last = self._likeliest[0]
                if self._candidates.rules_out_fewer(last):
                    return self._candidates.evaluated(last)
            nearest = min(nearest or evaluated, evaluated, key=lambda one: one.short_bytes)
        chosen = best or nearest
        assert chosen is not None, "there is at least one number of subsequences to try"
        return chosen

    def refined(self, best: EvaluatedCandidate, *, below: float) -> EvaluatedCandidate:
        """Return the fastest candidate over all N, simulated if its closed form may be inexact.

        Returns `best` unchanged for programs that cut units (MSP), which take long to make, and for
        large steps, which take long to simulate. No N is tried that takes at least `below` seconds.
        """
        if not is_quick(best):
            return best
        found = simulated_if_inexact(best)
        for bound_s, num_subsequences in self._bounds:
            most_s = min(found.step_s, below)
            if bound_s > most_s:
                break
            evaluated = self._candidates.evaluated(num_subsequences)
            if evaluated.shortfall is None and evaluated.prices.least_s <= most_s:
                other = self._candidates.simulated_if_inexact(num_subsequences)
                found = min(found, other, key=rank_of) if other.has_exact_time else found
        return found

    @property
    def fits(self) -> bool:
        """True if any candidate fits."""
        if not self.may_fit:
            return False
        if "best" in self.__dict__:
            return self.best.shortfall is None
        return any(map(self._candidates.fits, self._likeliest)) or self.best.shortfall is None

    def _is_slower_cut(self, num_subsequences: int, *, than: EvaluatedCandidate) -> bool:
        """Return whether a candidate under MSP is slower than `than`, without making its program.

        Making a program that cuts units takes long. The closed form of its time is at least that of
        whole units, which have more memory.
        """
        if self._candidates.candidate(num_subsequences).schedule != "sppo_msp":
            return False
        without_msp = self._candidates.without_msp(num_subsequences)
        return without_msp.shortfall is None and without_msp.time.step_s > than.time.step_s

    def every_candidate(self) -> list[EvaluatedCandidate]:
        """Return the evaluated candidates for every N, by N, without cut units (MSP)."""
        return [self._candidates.without_msp(num_subsequences) for num_subsequences in self._counts]

    @cached_property
    def _bounds(self) -> list[tuple[float, int]]:
        """Lower bound of the step time over all policies, and N, ascending by the bound."""
        bounds = []
        for num_subsequences, seconds in self._seconds.items():
            candidate = self._candidates.candidate(num_subsequences)
            bound_s = least_seconds(candidate, seconds=seconds)
            bounds.append((bound_s, num_subsequences))
        return sorted(bounds)

    @property
    def _work(self) -> Iterator[tuple[float, float]]:
        """Seconds of compute of a mean rank, and of filling and draining the pipeline, for each N.

        With one stage on each rank; compute includes the gradient reduction and the update.
        """
        for seconds in self._seconds.values():
            units = seconds.units
            passes = units.forward + units.backward + units.weight
            work_s = float(passes.sum()) / len(passes)
            updated_s = float(np.min(seconds.reduce_s + seconds.update_s))
            yield work_s + updated_s, float(passes[:-1, 0].sum())

    @cached_property
    def _seconds(self) -> Mapping[int, StageSeconds]:
        """Seconds of the units with everything retained, by N."""
        return {n: self._candidates.seconds(n) for n in self._counts}


def _short_first(evaluated: EvaluatedCandidate) -> tuple[int, float]:
    """Return a sort key: candidates that fit come first, by time; the others by missing memory."""
    if evaluated.shortfall is None:
        return 0, evaluated.time.step_s
    return evaluated.short_bytes, 0.0


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.9g}")


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
