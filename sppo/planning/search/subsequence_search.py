"""Search for the best number of subsequences within one division of devices and layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from sppo.cost.candidate import Candidate
from sppo.cost.stage_cost import StageSeconds, mean_work_seconds
from sppo.planning.search.candidate_cache import CandidateCache
from sppo.planning.search.choices import likeliest_to_fit
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.memory_bounds import least_short_bytes
from sppo.planning.search.ranking import rank_of
from sppo.planning.search.simulated_candidate import is_quick, simulated_if_inexact
from sppo.planning.search.step_prices import least_seconds

_ROUNDING = 1e-9
"""Relative margin for the rounding of sums of seconds."""


class SubsequenceSearch:
    """Search within one division of devices and layers, over numbers of subsequences."""

    def __init__(self, candidates: CandidateCache, *, counts: Sequence[int]) -> None:
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
