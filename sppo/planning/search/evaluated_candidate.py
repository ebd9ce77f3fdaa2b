"""Evaluation of a candidate: placement of activations, step time, memory, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, tee

import numpy as np

from sppo.activations.hybrid import choices
from sppo.activations.placement import ActivationPlacement, Counts
from sppo.activations.policy import POLICIES, decide, decide_ratio, seconds_added
from sppo.activations.policy_inputs import PolicyInputs
from sppo.cost.candidate import Candidate
from sppo.cost.memory.copy_room import with_placement
from sppo.cost.memory.msp import with_msp
from sppo.cost.memory.rank_program import holds_messages, with_messages_held
from sppo.cost.memory.stage_memory import StageMemory
from sppo.cost.memory.tier_memory import most_tier_bytes, node_host_bytes
from sppo.cost.memory.units_in_flight import UnitsInFlight
from sppo.cost.stage_cost import (
    StageSeconds,
    placed_bytes,
    stage_seconds,
)
from sppo.cost.step_time import StepTime
from sppo.planning.candidate_program import candidate_program
from sppo.planning.search.candidate_checks import (
    check_inputs_retained,
    check_kv,
    check_state,
    kv_choices,
    kv_mixes,
)
from sppo.planning.search.choices import Degrees
from sppo.planning.search.memory_bounds import (
    least_short_beside_inputs,
    least_short_bytes,
    least_short_of_placement,
    may_fit,
    memory_without_activations,
    short_beside,
)
from sppo.planning.search.policy_inputs import policy_inputs
from sppo.planning.search.shortfall import Shortfall, find_shortfall
from sppo.planning.search.step_prices import StepPrices, least_seconds
from sppo.schedule.actions import Schedule
from sppo.schedule.costs import Costs, Table
from sppo.schedule.program import with_messages
from sppo.schedule.simulation.simulated_step import SimulatedStep
from sppo.schedule.transfers.kv_placement import KVPlacement

_ATTEMPTS = 3
"""Most times that policies decide again, by a worse moment or with less memory."""
_ROUNDING = 1e-12
"""Relative rounding error of sums of seconds."""
_SLOTS_SHARE = 1 / 16
"""Largest shortfall, as a share of a device's budget, up to which policies decide again with less
memory if a rank has several stages."""


@dataclass(frozen=True, slots=True, eq=False)
class EvaluatedCandidate:
    """Candidate with its placement, memory, costs and step time.

    Attributes:
        candidate: The candidate.
        prices: Costs of the step under the placement of its activations.
        memory: Memory of one device of each pipeline rank.
        shortfall: Memory that the candidate lacks; None if it fits.
        simulated: Simulated step; None if only the closed form was computed.
        program: Program without messages, made for MSP, whose memory depends on it; None otherwise.
    """

    candidate: Candidate
    prices: StepPrices
    memory: tuple[StageMemory, ...]
    shortfall: Shortfall | None
    simulated: SimulatedStep | None = None
    program: Schedule | None = None

    @property
    def placement(self) -> ActivationPlacement:
        """Placement of the saved tensors."""
        return self.prices.placement

    @property
    def costs(self) -> Costs:
        """Cost tables of the step, for the simulator."""
        return self.prices.costs

    @property
    def time(self) -> StepTime:
        """Time of the step, in closed form."""
        return self.prices.time

    @property
    def step_s(self) -> float:
        """Seconds of the step: simulated if available, otherwise in closed form."""
        return self.time.step_s if self.simulated is None else self.simulated.step_s

    @property
    def has_exact_time(self) -> bool:
        """True if `step_s` is the simulated time, or equal to it."""
        return self.simulated is not None or self.prices.is_exact

    @property
    def degrees(self) -> Degrees:
        """Degrees of parallelism of the candidate."""
        return Degrees.of_candidate(self.candidate)

    def executed_program(self) -> Schedule:
        """Return the program of the step, with messages."""
        if self.program is None:
            return candidate_program(self.candidate, costs=self.costs)
        return with_messages(self.program, costs=self.costs)

    @property
    def device_peak_bytes(self) -> int:
        """Peak bytes of the fullest device."""
        return max(rank.device.total_bytes for rank in self.memory)

    @property
    def host_peak_bytes(self) -> int:
        """Peak bytes of host memory of the device that uses most of it."""
        return most_tier_bytes(self.memory, "host", candidate=self.candidate)

    @property
    def disk_peak_bytes(self) -> int:
        """Peak bytes of disk space of the device that uses most of it."""
        return most_tier_bytes(self.memory, "disk", candidate=self.candidate)

    @property
    def node_host_bytes(self) -> int:
        """Peak bytes of host memory of all devices of one node together; 0 on a CPU."""
        return node_host_bytes(self.memory, candidate=self.candidate)

    @property
    def kv(self) -> KVPlacement:
        """Placement of K and V on the first stage; the last stage of each rank retains them."""
        return self.candidate.kv_of_stage(0)

    @property
    def short_bytes(self) -> int:
        """Bytes of memory that the candidate lacks; 0 if it fits."""
        return 0 if self.shortfall is None else self.shortfall.short_bytes

    @property
    def effective_policy(self) -> str:
        """Activation policy in effect: "retain" if nothing is offloaded or recomputed."""
        if self.placement.offloaded.any() or self.placement.recomputed.any():
            return self.candidate.policy
        return "retain"


def evaluate_candidate(
    candidate: Candidate, *, seconds: StageSeconds | None = None
) -> EvaluatedCandidate:
    """Place the activations of a candidate, price it, and find out whether it fits.

    Under MSP, memory is known only once the program is made: activation policies decide as if all
    units ran whole, and leave more memory free until the program fits.

    Args:
        candidate: Candidate to evaluate.
        seconds: Seconds of the candidate's units, with everything retained; None to compute them.

    Raises:
        ValueError: There are more stages than layers, or the machine does not support the policy,
            the placement of K and V, or a tier of the training state.
    """
    seconds = seconds or stage_seconds(candidate)
    if candidate.kv is None:
        return _best_of_kv(candidate, seconds=seconds)
    check_kv(candidate)
    check_state(candidate)
    if candidate.schedule != "sppo_msp":
        found = _evaluate_with_room(candidate, seconds=seconds)
        check_inputs_retained(candidate, found.placement)
        return found
    spare, before = 0, None
    for _ in range(_ATTEMPTS):
        whole = _evaluate_whole_units(replace(candidate, spare_bytes=spare), seconds=seconds)
        if before is not None and _is_placed_alike(whole, before):
            break
        program = candidate_program(candidate, costs=whole.costs, messages=False)
        found = with_program(replace(whole, candidate=candidate), program=program)
        if found.shortfall is None or found.shortfall.place != "device":
            break
        spare, before = spare + found.shortfall.short_bytes * 5 // 4, whole
    return found


def _best_of_kv(candidate: Candidate, *, seconds: StageSeconds) -> EvaluatedCandidate:
    """Evaluate a candidate with the placements of K and V; return the fastest that fits.

    Retaining and offloading are tried first, recomputing only if neither fits, and recomputing on
    some stages only if nothing else fits. If no placement can fit, offloading is evaluated, or
    recomputing without a tier: these need less memory than retaining.
    """
    found: list[EvaluatedCandidate] = []
    for choice in _kv_worth_trying(candidate):
        if any(one.shortfall is None for one in found) and (
            choice.kv == "recomputed" or _is_fastest(found[-1])
        ):
            break
        if not _lacks_more(choice, than=found):
            found.append(evaluate_candidate(choice, seconds=seconds))
    if all(one.shortfall is not None for one in found):
        for mixed in _kv_mixes_worth_trying(candidate):
            if not _lacks_more(mixed, than=found):
                found.append(evaluate_candidate(mixed, seconds=seconds))
    return _best_of(found)


def _kv_mixes_worth_trying(candidate: Candidate) -> list[Candidate]:
    states = memory_without_activations(replace(candidate, kv="offloaded"))
    return [one for one in kv_mixes(candidate, states) if may_fit(one)]


def _lacks_more(candidate: Candidate, *, than: Sequence[EvaluatedCandidate]) -> bool:
    """Return whether a candidate surely lacks more memory than one of several that are evaluated.

    Stages that recompute K and V must retain their inputs, which takes more than other placements.
    Packed sequences are never ruled out: not all of their units are held at once.
    """
    if candidate.packed:
        return False
    short_bytes = least_short_beside_inputs(candidate)
    return any(one.shortfall is not None and short_bytes > one.short_bytes for one in than)


def _kv_worth_trying(candidate: Candidate) -> list[Candidate]:
    """Return the candidate with each placement of K and V that may fit; at least one of them."""
    choices = [replace(candidate, kv=placement) for placement in kv_choices(candidate)]
    return [one for one in choices if may_fit(one)] or choices[1:2] or choices


def _is_fastest(evaluated: EvaluatedCandidate) -> bool:
    """Return whether no placement of activations, K and V could make the candidate faster."""
    least_s = least_seconds(evaluated.candidate, seconds=evaluated.prices.seconds)
    return evaluated.time.step_s <= least_s * (1 + _ROUNDING)


def _best_of(found: Sequence[EvaluatedCandidate]) -> EvaluatedCandidate:
    """Return the fastest candidate that fits; if none fits, the first that lacks least memory."""
    fitting = [one for one in found if one.shortfall is None]
    if len(fitting) > 1:
        return min(fitting, key=lambda one: one.time.step_s)
    return fitting[0] if fitting else min(found, key=lambda one: one.short_bytes)


def evaluate_placement(candidate: Candidate, placement: ActivationPlacement) -> EvaluatedCandidate:
    """Evaluate a candidate with a given placement, ignoring its activation policy.

    Args:
        candidate: Candidate to evaluate.
        placement: Placement of the activations of the candidate's stages and subsequences.
    """
    units, states = UnitsInFlight(candidate), memory_without_activations(candidate)
    memory = with_placement(states, candidate=candidate, placement=placement, units=units)
    prices = StepPrices(candidate, stage_seconds(candidate), placement)
    found = EvaluatedCandidate(candidate, prices, memory, find_shortfall(candidate, memory))
    if candidate.schedule != "sppo_msp":
        return found
    program = candidate_program(candidate, costs=found.costs, messages=False)
    return with_program(found, program=program)


def any_that_fits(candidate: Candidate, *, seconds: StageSeconds) -> EvaluatedCandidate:
    """Return any placement that fits, units run whole: found sooner than the fastest.

    Placements of K and V that are likeliest to fit are tried first. If none fits, return the one
    that lacks the least memory.

    Args:
        candidate: Candidate to place activations for.
        seconds: Seconds of its units with everything retained.
    """
    if candidate.kv is None:
        found: list[EvaluatedCandidate] = []
        whole = sorted(_kv_worth_trying(candidate), key=least_short_bytes)
        for choice in chain(whole, _kv_mixes_worth_trying(candidate)):
            if _lacks_more(choice, than=found):
                continue
            found.append(any_that_fits(choice, seconds=seconds))
            if found[-1].shortfall is None:
                return found[-1]
        return _best_of(found)
    check_kv(candidate)
    check_state(candidate)
    evaluated = _evaluate_with_room(candidate, seconds=seconds, first_that_fits=True)
    if evaluated.shortfall is not None:
        check_inputs_retained(candidate, evaluated.placement)
    return evaluated


def _evaluate_with_room(
    candidate: Candidate, *, seconds: StageSeconds, first_that_fits: bool = False
) -> EvaluatedCandidate:
    """Evaluate a candidate with whole units; again with less memory if it misses by a little.

    The slots of a rank are as large as the largest block of any of its stages, but each stage
    decides with a share of slots as large as its own blocks, so stages together may use too much.
    """
    found = _evaluate_whole_units(candidate, seconds=seconds, first_that_fits=first_that_fits)
    short = found.shortfall
    if candidate.virtual_stages == 1 or short is None or short.place != "device":
        return found
    if short.short_bytes > candidate.budget_bytes * _SLOTS_SHARE:
        return found
    spare = candidate.spare_bytes + short.short_bytes * 5 // 4
    less = _evaluate_whole_units(
        replace(candidate, spare_bytes=spare), seconds=seconds, first_that_fits=first_that_fits
    )
    shortfall = find_shortfall(candidate, less.memory)
    return found if shortfall else replace(less, candidate=candidate, shortfall=None)


def with_program(evaluated: EvaluatedCandidate, *, program: Schedule) -> EvaluatedCandidate:
    """Return an evaluated candidate with its memory under a program that cuts units (MSP).

    Args:
        evaluated: Evaluated candidate, with the memory of ranks that run their own units whole.
        program: Program of a step, without messages.
    """
    candidate = evaluated.candidate
    memory = with_msp(
        evaluated.memory, candidate=candidate, placement=evaluated.placement, schedule=program
    )
    return replace(
        evaluated, memory=memory, shortfall=find_shortfall(candidate, memory), program=program
    )


def with_executed_program(evaluated: EvaluatedCandidate) -> EvaluatedCandidate:
    """Return an evaluated candidate with its memory under the program that is executed.

    Until then the memory includes the messages of the running unit, whatever the order of messages;
    the program may hold more of them, or fewer.
    """
    candidate = evaluated.candidate
    if not holds_messages(candidate):
        return evaluated
    memory = with_messages_held(
        evaluated.memory,
        candidate=candidate,
        placement=evaluated.placement,
        schedule=evaluated.executed_program(),
    )
    return replace(evaluated, memory=memory, shortfall=find_shortfall(candidate, memory))


def _is_placed_alike(one: EvaluatedCandidate, other: EvaluatedCandidate) -> bool:
    """Return whether two candidates that differ only in spare memory have equal placements."""
    first, second = one.placement, other.placement
    return all(
        np.array_equal(getattr(first, name), getattr(second, name))
        for name in ("retained", "offloaded", "recomputed")
    )


def _evaluate_whole_units(
    candidate: Candidate, *, seconds: StageSeconds, first_that_fits: bool = False
) -> EvaluatedCandidate:
    """Evaluate a candidate whose ranks run their own units whole.

    Policies decide by the units in flight at the moment when ranks hold most tokens. If several
    sequences overlap and subsequences retain unequal shares, another moment may need more memory;
    then policies decide again by both moments.

    Args:
        candidate: Candidate to evaluate.
        seconds: Seconds of the candidate's units, with everything retained.
        first_that_fits: Whether any placement that fits will do, rather than the fastest.
    """
    units, states = UnitsInFlight(candidate), memory_without_activations(candidate)
    in_flight = _most_tokens_in_flight(candidate, units)
    for _ in range(_ATTEMPTS):
        inputs = policy_inputs(
            candidate, seconds=seconds, in_flight=in_flight, units=units, states=states
        )
        choice = _PlacementChoice(candidate, seconds, inputs, units, states)
        found = choice.first_that_fits() if first_that_fits else choice.fastest()
        if found.shortfall is None or candidate.sequences == 1:
            break
        worst = units.counts(_retained_bytes(found))
        if (worst <= in_flight).all():
            break
        in_flight = np.maximum(in_flight, worst)
    return found


def _most_tokens_in_flight(candidate: Candidate, units: UnitsInFlight) -> Counts:
    """Return how often each unit is held when a rank holds most tokens, at least 1, [stages, N].

    A unit that is not held at that moment is held at another. Each unit of a single sequence, or
    of packed sequences, whose units are numbered through, is held at most once.
    """
    shape = candidate.num_stages, len(candidate.lengths)
    if candidate.sequences == 1:
        return np.ones(shape, dtype=np.int64)
    tokens = np.broadcast_to(np.array(candidate.lengths, dtype=np.float64), shape)
    return np.maximum(units.counts(tokens), 1)


@dataclass(frozen=True, slots=True, eq=False)
class _PlacementChoice:
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
            besides: Placement that does not fit, to return if the others lack more.
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
        """Yield placements by their step time, those that are as fast as possible without a sort.

        No placement is faster than that which retains everything.
        """
        least_s = self._priced(decide("retain", self.inputs)).time.step_s
        slower = []
        for prices in possible:
            if prices.time.step_s <= least_s:
                yield prices
            else:
                slower.append(prices)
        yield from sorted(slower, key=lambda prices: prices.time.step_s)

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


def _retained_bytes(evaluated: EvaluatedCandidate) -> Table:
    return placed_bytes(evaluated.placement, "retained", candidate=evaluated.candidate)


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
