"""Evaluation of a candidate: placement of activations, step time, memory, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sppo.activations.placement import ActivationPlacement, Counts
from sppo.cost.candidate import Candidate
from sppo.cost.memory.copy_room import with_placement
from sppo.cost.memory.units_in_flight import UnitsInFlight
from sppo.cost.stage_cost import StageSeconds, placed_bytes, stage_seconds
from sppo.planning.candidate_program import candidate_program
from sppo.planning.search.candidate_checks import (
    check_inputs_retained,
    check_kv,
    check_state,
    kv_choices,
    kv_mixes,
)
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate, with_program
from sppo.planning.search.memory_bounds import (
    may_fit,
    memory_without_activations,
)
from sppo.planning.search.placement_choice import PlacementChoice
from sppo.planning.search.policy_inputs import policy_inputs
from sppo.planning.search.shortfall import find_shortfall
from sppo.planning.search.step_prices import StepPrices
from sppo.schedule.costs import Table

_ATTEMPTS = 3
"""Most times that policies decide again, by a worse moment or with less memory."""
_SLOTS_SHARE = 1 / 16
"""Largest shortfall, as a share of a device's budget, up to which policies decide again with less
memory if a rank has several stages."""


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
        if choice.kv == "recomputed" and any(one.shortfall is None for one in found):
            break
        found.append(evaluate_candidate(choice, seconds=seconds))
    if all(one.shortfall is not None for one in found):
        found += [
            evaluate_candidate(mixed, seconds=seconds)
            for mixed in _kv_mixes_worth_trying(candidate)
        ]
    return _best_of(found)


def _kv_mixes_worth_trying(candidate: Candidate) -> list[Candidate]:
    states = memory_without_activations(replace(candidate, kv="offloaded"))
    return [one for one in kv_mixes(candidate, states) if may_fit(one)]


def _kv_worth_trying(candidate: Candidate) -> list[Candidate]:
    """Return the candidate with each placement of K and V that may fit; at least one of them."""
    choices = [replace(candidate, kv=placement) for placement in kv_choices(candidate)]
    return [one for one in choices if may_fit(one)] or choices[1:2] or choices


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
        choice = PlacementChoice(candidate, seconds, inputs, units, states)
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


def _retained_bytes(evaluated: EvaluatedCandidate) -> Table:
    return placed_bytes(evaluated.placement, "retained", candidate=evaluated.candidate)
