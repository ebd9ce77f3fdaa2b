"""Search within one division of the devices: over subsequences, stages on a rank and schedules.

Candidates are visited by a lower bound of their step time, until the bound exceeds the fastest
simulation. Retaining everything takes as long as the bound says, so where memory is plentiful few
candidates are evaluated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from sppo.config.run import RunConfig
from sppo.cost.candidate import Candidate
from sppo.hardware.description import HardwareSpec
from sppo.planning.search.bounds import least_seconds, least_shortfall, may_fit
from sppo.planning.search.candidates import (
    OTHER_SCHEDULES,
    candidates_of_degrees,
    with_schedule,
)
from sppo.planning.search.choices import Degrees, degrees_to_try, exceeds_sweet_spot, uses_msp
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.evaluation import WORTH_IT, evaluate_candidate
from sppo.planning.search.shortfall import Shortfall
from sppo.schedule.orders.names import LOOPED


@dataclass(frozen=True, slots=True)
class Rejection:
    """Degrees that do not fit or cannot work.

    Attributes:
        degrees: Rejected degrees.
        reason: Reason as text.
        candidate: Candidate that came nearest to fitting, or has the lowest bound; None if memory
            was not the reason.
        shortfall: Shortfall of this candidate; None if memory was not the reason.
        steps: Whether a step of the longest samples fits, but one drawn from the corpus does not.
    """

    degrees: Degrees
    reason: str
    candidate: Candidate | None = None
    shortfall: Shortfall | None = None
    steps: bool = False

    @property
    def num_subsequences(self) -> int | None:
        """Number of subsequences of the candidate; None if memory was not the reason."""
        return None if self.candidate is None else len(self.candidate.lengths)

    @property
    def short_bytes(self) -> float:
        """Missing bytes; infinite if memory was not the reason."""
        return inf if self.shortfall is None else self.shortfall.short_bytes

    @property
    def policy(self) -> str | None:
        """Activation policy that came nearest to fitting; None if none was tried."""
        if self.candidate is None or self.shortfall is None or self.shortfall.at_least:
            return None
        return self.candidate.policy


class Division:
    """One division of the devices, and the search for its best candidate.

    Args:
        run: Validated run configuration.
        hardware: Description of the machine.
        degrees: Degrees of parallelism.

    Raises:
        ValueError: Subsequences have fewer tokens than ranks need, for every N.
    """

    def __init__(self, run: RunConfig, *, hardware: HardwareSpec, degrees: Degrees) -> None:
        self.degrees, self._run = degrees, run
        plain = candidates_of_degrees(run, hardware=hardware, degrees=degrees)
        # Programs that cut units (MSP) take long to make: the plain order shows where to begin.
        self._cuts = uses_msp(run) and degrees.pipeline_parallel > 1
        self._plain = [replace(one, schedule=one.order) for one in plain] if self._cuts else plain
        self._counts = _few({len(one.lengths) for one in self._plain})
        self._few = [one for one in self._plain if len(one.lengths) in self._counts]
        self._evaluated: dict[Candidate, EvaluatedCandidate] = {}

    @property
    def plain_s(self) -> float:
        """Lower bound of the step time in the plain order with few values of N."""
        return min(map(least_seconds, self._few))

    @property
    def bound_s(self) -> float:
        """Lower bound of the step time with any schedule with few values of N."""
        cut = (with_schedule(self._run, one, "sppo_msp") for one in self._few)
        return min([self.plain_s, *(least_seconds(one) for one in cut if one is not None)])

    def best(self, *, below: float = inf) -> EvaluatedCandidate | None:
        """Return the best candidate that fits; None if none does.

        Few values of N are tried first, then those around the best of them, then other schedules.

        Args:
            below: Step time in seconds; what surely takes longer is not tried once any N fits.
        """
        if not self.may_fit:
            return None
        best = self._fastest(self._few)
        if best is not None:
            plain = self._fastest(self._between(best.candidate), best, below=below) or best
            best = self._in_best_schedule(plain, below=below)
        best = best or self.nearest
        return best if best.shortfall is None else None

    def _between(self, best: Candidate) -> list[Candidate]:
        """Return the candidates between the one of the few N that is best and its neighbours."""
        place = self._counts.index(len(best.lengths))
        near = self._counts[max(0, place - 1) : place + 2]
        return [
            one
            for one in self._plain
            if one.virtual_stages == best.virtual_stages
            and near[0] < len(one.lengths) < near[-1]
            and len(one.lengths) not in near
        ]

    def _in_best_schedule(
        self, plain: EvaluatedCandidate, *, below: float
    ) -> EvaluatedCandidate | None:
        """Return a candidate in the plain order, or with another schedule that saves 1 % or more.

        Args:
            plain: Candidate in the plain order; not returned if the run asks for units cut over
                ranks (MSP).
            below: Step time in seconds; surely slower schedules are not tried.
        """
        best = None if self._cuts else plain
        most_s = inf if self._cuts else min(plain.step_s * WORTH_IT, below)
        for virtual in sorted({1, plain.candidate.virtual_stages}):
            for schedule in OTHER_SCHEDULES:
                last_s = inf if self._cuts else plain.step_s
                for candidate in self._of_schedule(schedule, virtual, plain.candidate):
                    if least_seconds(candidate) > most_s:
                        continue
                    found = self._evaluate(candidate)
                    if found.shortfall is not None or found.step_s >= last_s:
                        break
                    last_s = found.step_s
                    if last_s <= most_s:
                        best, most_s = found, last_s
        return best

    def _of_schedule(
        self, schedule: str, virtual_stages: int, plain: Candidate
    ) -> Iterator[Candidate]:
        """Yield candidates with another schedule than the plain order, with fewer and fewer N.

        With smaller bubbles, fewer subsequences may be faster than in the plain order. More may be
        if K and V leave the device there, which other schedules retain.
        """
        alike = [one for one in self._plain if one.virtual_stages == virtual_stages]
        most = len(plain.lengths)
        if plain.kv != "retained":
            few = [one for one in self._few if one.virtual_stages == virtual_stages]
            most = max(most, len(min(few, key=least_seconds, default=plain).lengths))
        for turn in range(most.bit_length() if alike else 0):
            near = min(alike, key=lambda one: abs(len(one.lengths) - (most >> turn)))
            other = with_schedule(self._run, near, schedule)
            if other is None or not may_fit(other):
                return
            yield other

    def _fastest(
        self,
        candidates: Sequence[Candidate],
        best: EvaluatedCandidate | None = None,
        *,
        below: float = inf,
    ) -> EvaluatedCandidate | None:
        """Return the best candidate that fits; None if none does.

        Args:
            candidates: Candidates to try, with lower bounds of their step times.
            best: Best candidate so far.
            below: Step time in seconds; what surely takes longer is not tried.
        """
        bounds = [(least_seconds(one), one) for one in candidates]
        bounds = [(bound_s * _handicap(one), one) for bound_s, one in bounds if bound_s <= below]
        for bound_s, candidate in sorted(bounds, key=lambda one: one[0]):
            if best is not None and bound_s > _handicapped_s(best):
                break
            if not may_fit(candidate):
                continue
            found = self._evaluate(candidate)
            if found.shortfall is None:
                best = found if best is None else min(best, found, key=_handicapped_s)
            elif best is None and self._lacks_device_memory:
                break
        return best

    @property
    def may_fit(self) -> bool:
        """True if any candidate may fit, for any placement of saved activations."""
        return any(map(may_fit, self._likeliest))

    @property
    def fits(self) -> bool:
        """True if any candidate fits."""
        return self.may_fit and (
            self.nearest.shortfall is None
            or (not self._lacks_device_memory and self.best() is not None)
        )

    @property
    def nearest(self) -> EvaluatedCandidate:
        """Candidate that fits, or lacks least of those tried and those likeliest to fit."""
        for candidate in [*filter(may_fit, self._likeliest)] or self._likeliest:
            if self._evaluate(candidate).shortfall is None:
                return self._evaluate(candidate)
        schedules = {candidate.schedule for candidate in self._likeliest}
        tried = [one for one in self._evaluated.values() if one.candidate.schedule in schedules]
        return min(tried, key=lambda one: one.short_bytes)

    @cached_property
    def _likeliest(self) -> list[Candidate]:
        """Candidates of which one fits if any does, unless host memory or the disk is short.

        Memory shrinks as N and the stages on a rank grow. On a CPU, memory also grows with the code
        compiled for subsequences of every length, so every N is likely.
        """
        every_n = self._plain[0].workload.hardware.device.kind == "cpu"
        last: dict[int, Candidate] = {one.virtual_stages: one for one in self._plain}
        some = self._plain if every_n else last.values()
        ends = (min(last), max(last))
        likely = [one for one in some if one.virtual_stages in ends]
        likely.sort(key=lambda one: (one.virtual_stages, len(one.lengths)), reverse=True)
        return [replace(one, schedule="sppo_msp") for one in likely] if self._cuts else likely

    @property
    def _lacks_device_memory(self) -> bool:
        """True if no candidate fits, as the likeliest to fit lack memory of the device.

        Host memory of a fixed offload ratio grows with N, since the last subsequence is not
        offloaded, and what a rank holds under MSP depends on its program: False for these.
        """
        short = self.nearest.shortfall
        return short is not None and short.place == "device" and not self._cuts

    def rejection(self, *, exact: bool = False) -> Rejection | None:
        """Return what the division lacks, of which no candidate fits; None if any may fit.

        If no candidate was tried, this is a lower bound, which takes little time.

        Args:
            exact: Whether to try the candidates that are likeliest to fit.
        """
        if exact or self._evaluated:
            return rejection_of(self.nearest)
        bounds = [(one, least_shortfall(one)) for one in self._likeliest]
        short = [(one, shortfall) for one, shortfall in bounds if shortfall is not None]
        if len(short) < len(bounds):
            return None
        candidate, shortfall = min(short, key=lambda one: one[1].short_bytes)
        return Rejection(self.degrees, shortfall.reason, candidate, shortfall)

    def by_num_subsequences(self, best: EvaluatedCandidate) -> tuple[EvaluatedCandidate, ...]:
        """Return the candidates of few N, and of every N that was tried, that fit; by N.

        They have as many stages on a rank as the best, and its schedule unless that cuts units.
        """
        alike = (
            replace(one, schedule=one.order)
            for one in self._plain
            if one.virtual_stages == best.candidate.virtual_stages
        )
        found = (
            self._evaluate(one)
            for one in alike
            if one in self._evaluated or len(one.lengths) in self._counts
        )
        return tuple(one for one in found if one.shortfall is None)

    def _evaluate(self, candidate: Candidate) -> EvaluatedCandidate:
        if candidate not in self._evaluated:
            self._evaluated[candidate] = evaluate_candidate(candidate)
        return self._evaluated[candidate]


def divide(
    run: RunConfig, *, hardware: HardwareSpec, across_nodes: bool = False
) -> tuple[list[Division], list[Rejection]]:
    """Return the divisions of the machine that the run allows, and those that cannot work.

    Args:
        run: Validated run configuration.
        hardware: Description of the machine.
        across_nodes: Return the divisions with sequence parallelism over several nodes instead.

    Raises:
        ValueError: See :func:`sppo.planning.search.choices.degrees_to_try`.
    """
    possible, refused = degrees_to_try(run, hardware=hardware, across_nodes=across_nodes)
    rejected = [Rejection(degrees, reason) for degrees, reason in refused.items()]
    divisions = []
    for degrees in possible:
        try:
            divisions.append(Division(run, hardware=hardware, degrees=degrees))
        except ValueError as error:
            rejected.append(Rejection(degrees, str(error)))
    return divisions, rejected


def rejection_of(nearest: EvaluatedCandidate) -> Rejection:
    """Return the rejection of degrees of which even the nearest candidate does not fit."""
    assert nearest.shortfall is not None, "only made of what does not fit"
    shortfall = nearest.shortfall
    return Rejection(nearest.degrees, shortfall.reason, nearest.candidate, shortfall)


def _few(counts: Collection[int]) -> list[int]:
    """Return the powers of two among numbers of subsequences, the first and the last; ascending."""
    ends = min(counts), max(counts)
    return sorted(count for count in counts if count & (count - 1) == 0 or count in ends)


def _handicap(candidate: Candidate) -> float:
    """Return the factor by which a candidate must be faster than one that is better known."""
    several = candidate.virtual_stages > 1
    other = candidate.schedule not in ("sppo", LOOPED)
    return WORTH_IT ** -(several + other + exceeds_sweet_spot(candidate))


def _handicapped_s(evaluated: EvaluatedCandidate) -> float:
    return evaluated.step_s * _handicap(evaluated.candidate)
