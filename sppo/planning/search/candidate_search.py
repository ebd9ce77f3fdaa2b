"""Search for the fastest candidates of a request: which to price, and which never to look at.

Branch and bound, best first. Retaining everything bounds the time of every policy from below. Ways
to divide the devices are looked at in the order of that bound, and so are the numbers of
subsequences of each, so whoever takes the first few candidates pays for little more than these.
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
from sppo.cost.stage_cost import StageSeconds, stage_seconds
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
    assess,
    least_seconds,
    least_short_bytes,
    leaves_room,
)
from sppo.planning.search.shortfall import Shortfall
from sppo.planning.search.simulated_candidate import is_quick, judged_candidate

WORTH_IT = 0.99
"""Another schedule is taken if it leaves at most this fraction of the step: predictions are not so
exact that less would count, and the simplest program is the best to run."""
_FEW = 4
"""Values of N that are tried with several stages on a rank."""
Rank = tuple[float, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Rejection:
    """Degrees that do not fit or cannot work.

    Attributes:
        degrees: Which.
        num_subsequences: N that came nearest to fitting; None where it does not depend on N.
        policy: Activation policy that came nearest.
        virtual_stages: Stages on each rank with which it did.
        reason: Text that says why.
        shortfall: Where memory is short.
    """

    degrees: Degrees
    reason: str
    num_subsequences: int | None = None
    policy: str | None = None
    shortfall: Shortfall | None = None
    virtual_stages: int = 1


class CandidateSearch:
    """Candidates of a request on a machine, by time.

    Args:
        run: The request.
        hardware: The machine.
        subsequence_counts: Values of N to try; () for those worth trying.

    Raises:
        ValueError: degrees in the run that need more devices than there are.
    """

    def __init__(
        self,
        run: RunConfig,
        *,
        hardware: HardwareSpec,
        subsequence_counts: Sequence[int] = (),
    ) -> None:
        possible, self._refused = degrees_to_try(run, hardware=hardware)
        self._ways: dict[Degrees, _WaysOfDegrees] = {}
        for degrees in possible:
            counts, problem = counts_of_degrees(
                run, hardware=hardware, degrees=degrees, counts=subsequence_counts
            )
            if counts:
                self._ways[degrees] = _WaysOfDegrees(
                    run, hardware=hardware, degrees=degrees, counts=counts
                )
            else:
                self._refused.append(Refusal(degrees, problem))

    def fastest_first(self, *, most_s: float = math.inf) -> Iterator[EvaluatedCandidate]:
        """Yield the best candidate that fits of every way to divide the devices, fastest first.

        Args:
            most_s: Seconds of a step above which nobody wants it: bounds rule it out.
        """
        heap: list[tuple[Rank, int, _WaysOfDegrees, EvaluatedCandidate | None]] = [
            ((_rounded(way.bound_s), 0, 0, 0, 0), place, way, None)
            for place, way in enumerate(self._ways.values())
            if way.may_take(most_s) and way.may_fit
        ]
        heapq.heapify(heap)
        while heap:
            _, place, way, found = heapq.heappop(heap)
            if found is not None:
                yield found
            elif way.best.shortfall is None:
                heapq.heappush(heap, (rank_of(way.best), place, way, way.best))

    def refined(self, found: EvaluatedCandidate, *, below: float = math.inf) -> EvaluatedCandidate:
        """Return the best with the degrees of a candidate that was found, N chosen by simulation.

        Args:
            found: by the closed form, simulated or not.
            below: seconds of a step; only values of N that may take less are simulated.
        """
        return self._ways[found.degrees].refined(found, below=below)

    def by_num_subsequences(
        self, degrees: Degrees, *, virtual_stages: int
    ) -> tuple[EvaluatedCandidate, ...]:
        """Candidates with these degrees, so many stages on a rank, and every N that fits, by N."""
        found = self._ways[degrees].every_candidate(virtual_stages)
        return tuple(evaluated for evaluated in found if evaluated.shortfall is None)

    def rejections(self) -> tuple[Rejection, ...]:
        """Return the ways to divide the devices that do not fit or cannot work."""
        refused = [Rejection(refusal.degrees, refusal.reason) for refusal in self._refused]
        nearest = [way.best for way in self._ways.values() if not way.fits]
        return (*refused, *map(_rejection, nearest))


def best_of_degrees(
    run: RunConfig, *, hardware: HardwareSpec, degrees: Degrees
) -> EvaluatedCandidate:
    """The fastest candidate with these degrees, of every N and v worth trying, that fits.

    Where none does, the one short of least memory.

    Raises:
        ValueError: subsequences too short to be shared by so many ranks, whatever N.
    """
    counts, problem = counts_of_degrees(run, hardware=hardware, degrees=degrees)
    if not counts:
        raise ValueError(problem)
    ways = _WaysOfDegrees(run, hardware=hardware, degrees=degrees, counts=counts)
    return ways.refined(ways.best)


def rank_of(evaluated: EvaluatedCandidate) -> Rank:
    """Faster first; of equals the one with fewer devices, ranks, stages, subsequences."""
    degrees = evaluated.degrees
    return (
        _rounded(evaluated.step_s),
        degrees.num_devices,
        degrees.pipeline_parallel,
        evaluated.candidate.virtual_stages,
        len(evaluated.candidate.lengths),
    )


class _WaysOfDegrees:
    """One way to divide the devices, with every number of virtual stages worth trying.

    Several stages on a rank are looked at only where they promise to be faster by enough, or where
    one does not fit.
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
        self._ways: dict[tuple[int, tuple[int, ...]], _Way] = {}
        self._assessments: dict[int, _Assessments] = {}

    @property
    def may_fit(self) -> bool:
        """Return whether any candidate may fit."""
        return any(self._way(virtual).may_fit for virtual in (self._simplest, *self._further))

    def may_take(self, most_s: float) -> bool:
        """Return whether any candidate may take at most `most_s`; quick where all may."""
        return most_s == math.inf or self.bound_s <= most_s

    @cached_property
    def bound_s(self) -> float:
        """Seconds that none of its candidates is faster than, whether it fits or not."""
        way = self._way(self._simplest)
        if not self._further:
            return way.bound_s
        return min(way.bound_s, way.looped_bound_s(max(self._further)))

    @cached_property
    def best(self) -> EvaluatedCandidate:
        """The fastest that fits; the one short of least if none does.

        Of several stages on a rank most are looked at first: they idle least, and their gradients
        of K and V are the least. Fewer are taken where they are faster still.
        """
        simplest = self._way(self._simplest)
        if self._further and not simplest.may_fit:
            most_stages = self._best_that_fits(self._further[-1])
            if simplest.least_short_bytes > most_stages.short_bytes:
                return most_stages
        best = simplest.best
        for virtual in reversed(self._further):
            if best.shortfall is not None:
                # Where most stages do not fit, fewer do not either.
                return min(best, self._best_that_fits(virtual), key=_short_first)
            counts = self._counts_beside(best, virtual)
            found = self._faster(self._way(virtual, counts=counts), than=best)
            best = found or best
        return best

    def refined(self, found: EvaluatedCandidate, *, below: float = math.inf) -> EvaluatedCandidate:
        """Return one of them with the number of subsequences with which it simulates fastest.

        Only those are simulated that may take less than `below` seconds.
        """
        if found.shortfall is not None:
            return found
        return self._way(found.candidate.virtual_stages).refined(found, below=below)

    @property
    def fits(self) -> bool:
        """Return whether any of its candidates fits."""
        if "best" in self.__dict__:
            return self.best.shortfall is None
        return self._way(self._simplest).fits or (
            bool(self._further) and self._way(self._further[-1], counts=self._few_likeliest).fits
        )

    def _best_that_fits(self, virtual_stages: int) -> EvaluatedCandidate:
        """Return the best with so many stages on a rank, where fewer subsequences may not fit.

        The few likeliest numbers of subsequences tell whether anything fits; then all are tried
        from the smallest one on that fits.
        """
        found = self._way(virtual_stages, counts=self._few_likeliest).best
        if found.shortfall is not None or self._few_likeliest == self._counts:
            return found
        candidates = self._assessments[virtual_stages]
        first = bisect_left(self._counts, True, key=candidates.fits)
        return self._way(virtual_stages, counts=self._counts[first:]).best

    def _faster(self, way: _Way, *, than: EvaluatedCandidate) -> EvaluatedCandidate | None:
        """Return the best of a way that is faster by enough; None if it has none."""
        least_s = self._way(self._simplest).looped_bound_s(way.virtual_stages)
        most_s = than.time.step_s * WORTH_IT
        if least_s > most_s or not way.may_fit or way.bound_s > most_s:
            return None
        found = way.best
        return found if found.shortfall is None and found.time.step_s <= most_s else None

    def _counts_beside(self, found: EvaluatedCandidate, virtual_stages: int) -> Sequence[int]:
        """Values of N to try: fewer subsequences fill a pipeline that they pass several times."""
        most = len(found.candidate.lengths) * found.candidate.virtual_stages
        least = most // virtual_stages
        counts = [n for n in self._counts if least <= n <= most] or [self._counts[-1]]
        last = len(counts) - 1
        return sorted({counts[last * step // (_FEW - 1)] for step in range(_FEW)})

    def every_candidate(self, virtual_stages: int) -> list[EvaluatedCandidate]:
        """All candidates with so many stages on a rank, by N, with whole units."""
        return self._way(virtual_stages).every_candidate()

    def _way(self, virtual_stages: int, *, counts: Sequence[int] = ()) -> _Way:
        """Return the way with so many stages on a rank; with every N unless `counts` are given."""
        if virtual_stages not in self._assessments:
            self._assessments[virtual_stages] = _Assessments(
                self._run,
                hardware=self._hardware,
                degrees=self._degrees,
                virtual_stages=virtual_stages,
            )
        key = virtual_stages, tuple(counts or self._counts)
        if key not in self._ways:
            self._ways[key] = _Way(self._assessments[virtual_stages], counts=key[1])
        return self._ways[key]


class _Assessments:
    """Candidates of one way to divide devices and layers, by N, each made and assessed once."""

    def __init__(
        self, run: RunConfig, *, hardware: HardwareSpec, degrees: Degrees, virtual_stages: int
    ) -> None:
        self._run, self._degrees = run, degrees
        self.hardware, self.virtual_stages = hardware, virtual_stages
        self._candidates: dict[int, Candidate] = {}
        self._seconds: dict[int, StageSeconds] = {}
        self._assessed: dict[tuple[int, str], EvaluatedCandidate] = {}
        self._fits: dict[int, bool] = {}

    def candidate(self, num_subsequences: int) -> Candidate:
        """Return the candidate with so many subsequences."""
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
        """Return the seconds of its units when everything is retained."""
        if num_subsequences not in self._seconds:
            self._seconds[num_subsequences] = stage_seconds(self.candidate(num_subsequences))
        return self._seconds[num_subsequences]

    def assessed(self, num_subsequences: int) -> EvaluatedCandidate:
        """Return what it comes to."""
        return self._assess(self.candidate(num_subsequences))

    def judged(self, num_subsequences: int) -> EvaluatedCandidate:
        """Return the same of what fits, simulated where its closed form may be off."""
        evaluated = judged_candidate(self.assessed(num_subsequences))
        self._assessed[num_subsequences, evaluated.candidate.schedule] = evaluated
        return evaluated

    def whole(self, num_subsequences: int) -> EvaluatedCandidate:
        """Return the same; with MSP, which decides what it cuts by a search, as if it cut nothing.

        Both take as long, and need the same without saved activations.
        """
        return self._assess(self._whole_candidate(num_subsequences))

    def fits(self, num_subsequences: int) -> bool:
        """Return whether it fits with whole units."""
        candidate = self._whole_candidate(num_subsequences)
        key = num_subsequences, candidate.schedule
        if key in self._assessed:
            return self._assessed[key].shortfall is None
        if num_subsequences not in self._fits:
            found = any_that_fits(candidate, seconds=self.seconds(num_subsequences))
            self._fits[num_subsequences] = found.shortfall is None
            if found.shortfall is not None:
                self._assessed[key] = found
        return self._fits[num_subsequences]

    def seems_to_fit(self, num_subsequences: int) -> bool:
        """Return whether it fits with whole units; True, too, if that takes long to tell."""
        known = self._fits.get(num_subsequences)
        if known is not None:
            return known
        return leaves_room(self.candidate(num_subsequences)) or self.fits(num_subsequences)

    def _whole_candidate(self, num_subsequences: int) -> Candidate:
        candidate = self.candidate(num_subsequences)
        cuts = candidate.schedule != candidate.order
        return replace(candidate, schedule=candidate.order) if cuts else candidate

    def _assess(self, candidate: Candidate) -> EvaluatedCandidate:
        num_subsequences = len(candidate.lengths)
        key = num_subsequences, candidate.schedule
        if key not in self._assessed:
            self._assessed[key] = assess(candidate, seconds=self.seconds(num_subsequences))
        return self._assessed[key]


class _Way:
    """One way to divide devices and layers, with some numbers of subsequences."""

    def __init__(self, candidates: _Assessments, *, counts: Sequence[int]) -> None:
        self._candidates, self._counts = candidates, counts
        self._likeliest = likeliest_to_fit(counts, hardware=candidates.hardware)
        self.virtual_stages = candidates.virtual_stages

    @cached_property
    def may_fit(self) -> bool:
        """Return whether any candidate may fit, whatever is done with saved activations."""
        return self.least_short_bytes <= 0

    @cached_property
    def least_short_bytes(self) -> int:
        """Bytes by which every candidate does not fit at least; 0 or less where one may."""
        return min(least_short_bytes(self._candidates.candidate(n)) for n in self._likeliest)

    @cached_property
    def _worth_trying(self) -> Sequence[int]:
        """Values of N that may fit: where the likeliest do not, no other does."""
        if len(self._likeliest) == len(self._counts):
            return self._counts
        last = self._counts[-1]
        return self._counts if self._candidates.seems_to_fit(last) else self._counts[-1:]

    @property
    def bound_s(self) -> float:
        """Seconds that none of its candidates is faster than, whether it fits or not."""
        return self._bounds[0][0]

    def looped_bound_s(self, virtual_stages: int) -> float:
        """Seconds that so many stages on each of its ranks are hardly faster than."""
        return min(work_s + ramp_s / virtual_stages for work_s, ramp_s in self._work)

    @cached_property
    def best(self) -> EvaluatedCandidate:
        """The fastest that fits; the one short of least if none does."""
        if not self.may_fit:
            return self._candidates.whole(self._counts[-1])
        if len(self._worth_trying) == 1:
            return self._candidates.assessed(self._worth_trying[0])
        best = nearest = None
        for bound_s, num_subsequences in self._bounds:
            if best is not None and bound_s > best.time.step_s:
                break
            if best is not None and self._is_slower_cut(num_subsequences, than=best):
                continue
            evaluated = self._candidates.assessed(num_subsequences)
            if evaluated.shortfall is None:
                best = min(best or evaluated, evaluated, key=rank_of)
                continue
            if nearest is None and len(self._likeliest) == 1:
                likeliest = self._candidates.assessed(self._likeliest[0])
                if likeliest.shortfall is not None:
                    return likeliest
            nearest = min(nearest or evaluated, evaluated, key=lambda one: one.short_bytes)
        chosen = best or nearest
        assert chosen is not None, "there is at least one number of subsequences to try"
        return chosen

    def refined(self, best: EvaluatedCandidate, *, below: float) -> EvaluatedCandidate:
        """Return the fastest of all, where closed forms may be off as simulated.

        Programs that cut units (MSP) take long to make, and large steps to simulate: of those it
        is `best`, which the closed form found. So it is where none may take less than `below`
        seconds.
        """
        if not is_quick(best):
            return best
        found = judged_candidate(best)
        for bound_s, num_subsequences in self._bounds:
            most_s = min(found.step_s, below)
            if bound_s > most_s:
                break
            evaluated = self._candidates.assessed(num_subsequences)
            if evaluated.shortfall is None and evaluated.prices.least_s <= most_s:
                judged = self._candidates.judged(num_subsequences)
                found = min(found, judged, key=rank_of) if judged.is_judged else found
        return found

    @property
    def fits(self) -> bool:
        """Return whether any of its candidates fits."""
        if not self.may_fit:
            return False
        if "best" in self.__dict__:
            return self.best.shortfall is None
        return any(map(self._candidates.fits, self._likeliest)) or self.best.shortfall is None

    def _is_slower_cut(self, num_subsequences: int, *, than: EvaluatedCandidate) -> bool:
        """Return whether a program that cuts units (MSP), which takes long to make, is slower.

        The closed form of its time is that of whole units in the memory that shards leave.
        """
        if self._candidates.candidate(num_subsequences).schedule != "sppo_msp":
            return False
        whole = self._candidates.whole(num_subsequences)
        return whole.shortfall is None and whole.time.step_s > than.time.step_s

    def every_candidate(self) -> list[EvaluatedCandidate]:
        """All candidates, by N, with whole units."""
        return [self._candidates.whole(num_subsequences) for num_subsequences in self._counts]

    @cached_property
    def _bounds(self) -> list[tuple[float, int]]:
        """Seconds that no policy is faster than, and N; the least first."""
        bounds = []
        for num_subsequences, seconds in self._seconds.items():
            candidate = self._candidates.candidate(num_subsequences)
            bound_s = least_seconds(candidate, seconds=seconds)
            bounds.append((bound_s, num_subsequences))
        return sorted(bounds)

    @property
    def _work(self) -> Iterator[tuple[float, float]]:
        """Yield, for each N, seconds of compute of a mean rank, and of a unit's way there and back.

        With one stage on each rank.
        """
        for seconds in self._seconds.values():
            units = seconds.units
            passes = units.forward + units.backward + units.weight
            work_s = float(passes.sum()) / len(passes)
            updated_s = float(np.min(seconds.reduce_s + seconds.update_s))
            yield work_s + updated_s, float(passes[:-1, 0].sum())

    @cached_property
    def _seconds(self) -> Mapping[int, StageSeconds]:
        """Seconds of the units for each N."""
        return {n: self._candidates.seconds(n) for n in self._counts}


def _short_first(evaluated: EvaluatedCandidate) -> tuple[int, float]:
    """Return the order of candidates: those that fit, by time; then by the memory they lack."""
    if evaluated.shortfall is None:
        return 0, evaluated.time.step_s
    return evaluated.short_bytes, 0.0


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.9g}")


def _rejection(nearest: EvaluatedCandidate) -> Rejection:
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
