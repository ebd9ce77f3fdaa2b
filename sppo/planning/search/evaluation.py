"""Evaluation of a candidate: placement of activations, step time, memory, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sppo.activations.placement import ActivationPlacement, Counts
from sppo.cost.candidate import Candidate
from sppo.cost.memory.copy_room import with_placement
from sppo.cost.memory.units_in_flight import UnitsInFlight
from sppo.cost.stage_cost import StageSeconds, stage_seconds
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
from sppo.planning.search.placement_choice import place
from sppo.planning.search.policy_inputs import policy_inputs
from sppo.planning.search.shortfall import find_shortfall
from sppo.planning.search.step_prices import StepPrices


def evaluate_candidate(
    candidate: Candidate, *, seconds: StageSeconds | None = None
) -> EvaluatedCandidate:
    """Place the activations of a candidate, price it, and find out whether it fits.

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
    units = UnitsInFlight(candidate)
    inputs = policy_inputs(
        candidate,
        seconds=seconds,
        in_flight=_most_tokens_in_flight(candidate, units),
        units=units,
        states=memory_without_activations(candidate),
    )
    found = place(candidate, seconds=seconds, inputs=inputs, evaluate=_with_memory)
    check_inputs_retained(candidate, found.placement)
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
    return _with_memory(StepPrices(candidate, stage_seconds(candidate), placement))


def _with_memory(prices: StepPrices) -> EvaluatedCandidate:
    """Return a priced candidate with its memory, under MSP that of its program."""
    candidate = prices.candidate
    memory = with_placement(
        memory_without_activations(candidate),
        candidate=candidate,
        placement=prices.placement,
        units=UnitsInFlight(candidate),
    )
    found = EvaluatedCandidate(candidate, prices, memory, find_shortfall(candidate, memory))
    if candidate.schedule != "sppo_msp":
        return found
    program = candidate.program(found.costs, messages=False)
    return with_program(found, program=program)


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
