"""Choice among the placements of activations that a candidate's policy allows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, tee

from sppo.activations.hybrid import choices
from sppo.activations.placement import ActivationPlacement
from sppo.activations.policy import POLICIES, decide, decide_ratio, seconds_added
from sppo.activations.policy_inputs import PolicyInputs
from sppo.cost.candidate import Candidate
from sppo.cost.memory.copy_room import with_placement
from sppo.cost.memory.stage_memory import StageMemory
from sppo.cost.memory.units_in_flight import UnitsInFlight
from sppo.cost.stage_cost import StageSeconds
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.memory_bounds import least_short_of_placement, short_beside
from sppo.planning.search.shortfall import find_shortfall
from sppo.planning.search.step_prices import StepPrices, times_of_placements


@dataclass(frozen=True, slots=True, eq=False)
class PlacementChoice:
    """Choice among the placements that a candidate's activation policy allows.

    Attributes:
        candidate: Candidate whose activations are placed.
        seconds: Seconds of the candidate's units, with everything retained.
        inputs: Inputs of the activation policy.
        units: Units in flight on each rank.
        states: Memory of each rank without saved activations.
    """

    candidate: Candidate
    seconds: StageSeconds
    inputs: PolicyInputs
    units: UnitsInFlight
    states: tuple[StageMemory, ...]

    def fastest(self) -> EvaluatedCandidate:
        """Return the fastest placement that fits; if none fits, the one that lacks least memory."""
        if (free := self._retaining()) is not None:
            return free
        tried, possible = tee(self._possible())
        if (free := self._hiding(tried)) is not None:
            return free
        every = chain(possible, self._of_other_policies())
        return self._first(self._fastest_first(every) if self._is_free_to_choose else every)

    def first_that_fits(self) -> EvaluatedCandidate:
        """Return any placement that fits; if none fits, the one that lacks least memory."""
        tried, possible = tee(self._possible())
        found = self._first(tried)
        if found.shortfall is None:
            return found
        return (
            self._retaining()
            or self._recomputing()
            or self._hiding(possible)
            or self._first(self._of_other_policies(), besides=found)
        )

    def _retaining(self) -> EvaluatedCandidate | None:
        """Return the placement that retains everything if it fits and the policy allows it.

        The hybrid policy decides with room for the working set of any placement, including those
        that recompute. Placements that cost no time are tried with their own working sets.
        """
        return self._if_it_fits("retain") if self._is_free_to_choose else None

    def _recomputing(self) -> EvaluatedCandidate | None:
        """Return the placement that recomputes everything if it fits and the policy allows it."""
        return self._if_it_fits("recompute") if self._is_free_to_choose else None

    def _hiding(self, possible: Iterable[StepPrices]) -> EvaluatedCandidate | None:
        """Return the placement that offloads all that hides, if every placement adds time.

        None if it does not fit, some placement in `possible` adds no time, or the policy is fixed.
        """
        if not self._is_free_to_choose or not self.inputs.copy_bytes_per_s:
            return None
        costs_time = all(seconds_added(one.placement, self.inputs) for one in possible)
        return self._if_it_fits("sppo") if costs_time else None

    @property
    def _is_free_to_choose(self) -> bool:
        candidate = self.candidate
        chooses = candidate.policy == "hybrid" and candidate.offload_ratio is None
        return chooses and self._may_fit

    @property
    def _may_fit(self) -> bool:
        """Return whether any placement may fit."""
        return short_beside(self.candidate, states=self.states) <= 0

    def _if_it_fits(self, policy: str) -> EvaluatedCandidate | None:
        prices = self._priced(decide(policy, self.inputs))
        if self._least_short_bytes(prices) > 0:
            return None
        found = self._evaluated(prices)
        return found if found.shortfall is None else None

    def _first(
        self, possible: Iterable[StepPrices], *, besides: EvaluatedCandidate | None = None
    ) -> EvaluatedCandidate:
        """Return the first placement that fits; if none fits, the one that lacks least memory.

        Args:
            possible: Placements to try; at least one if `besides` is None.
            besides: Placement that does not fit, to return if no other fits or lacks less.
        """
        nearest = besides
        for prices in possible:
            if nearest is not None and self._least_short_bytes(prices) >= nearest.short_bytes:
                continue
            found = self._evaluated(prices)
            if found.shortfall is None:
                return found
            nearest = min(nearest or found, found, key=lambda one: one.short_bytes)
        assert nearest is not None, "there is at least one placement to try"
        return nearest

    def _fastest_first(self, possible: Iterable[StepPrices]) -> Iterator[StepPrices]:
        """Yield placements by their step time; of equally fast ones, the first comes first.

        Up to rounding, no placement is faster than that which retains everything. Placements that
        are as fast come as they are made; only after the first slower one are the others priced,
        all together.
        """
        least_s = self._priced(decide("retain", self.inputs)).time.step_s
        left = iter(possible)
        for prices in left:
            if prices.time.step_s > least_s:
                break
            yield prices
        else:
            return
        others = [prices, *left]
        step_s = [time.step_s for time in times_of_placements(others)]
        for place in sorted(range(len(others)), key=step_s.__getitem__):
            yield others[place]

    def _least_short_bytes(self, prices: StepPrices) -> float:
        return least_short_of_placement(self.candidate, prices.placement)

    def _possible(self) -> Iterator[StepPrices]:
        return map(self._priced, _placements(self.candidate, self.inputs))

    def _of_other_policies(self) -> Iterator[StepPrices]:
        """Yield the placements of the other policies if the policy is free to choose them.

        With their own working sets they may fit even if the room of the hybrid policy, which allows
        for any working set, is too small.
        """
        if not self._is_free_to_choose:
            return
        may_offload = self.inputs.copy_bytes_per_s > 0 and not self.candidate.kv_recomputed
        offloading = ("sppo", "offload_all") if may_offload else ()
        for policy in (*POLICIES[1:], *offloading):
            yield self._priced(decide(policy, self.inputs))

    def _priced(self, placement: ActivationPlacement) -> StepPrices:
        return StepPrices(self.candidate, self.seconds, placement)

    def _evaluated(self, prices: StepPrices) -> EvaluatedCandidate:
        memory = with_placement(
            self.states, candidate=self.candidate, placement=prices.placement, units=self.units
        )
        return EvaluatedCandidate(
            self.candidate, prices, memory, find_shortfall(self.candidate, memory)
        )


def _placements(candidate: Candidate, inputs: PolicyInputs) -> Iterable[ActivationPlacement]:
    """Return the placements among which the activation policy takes the fastest."""
    policy, ratio = candidate.policy, candidate.offload_ratio
    if ratio is not None:
        if ratio > 0 and policy in POLICIES:
            raise ValueError(
                f"activations.offload_ratio {ratio:g} with activations.policy {policy!r}, which "
                "offloads nothing: leave one of the two keys out"
            )
        return [decide_ratio(inputs, ratio=ratio)]
    return choices(inputs) if policy == "hybrid" else [decide(policy, inputs)]
