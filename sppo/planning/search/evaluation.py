"""Evaluation of a candidate: placement of activations, step time, memory, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from sppo.activations.placement import ActivationPlacement, Counts
from sppo.cost.candidate import Candidate
from sppo.cost.memory.copy_room import with_placement
from sppo.cost.memory.stage_memory import StageMemory
from sppo.cost.memory.walk import walk_of
from sppo.cost.stage_cost import StageSeconds, stage_seconds
from sppo.planning.search.bounds import may_fit, memory_without_activations
from sppo.planning.search.candidate_checks import (
    check_inputs_retained,
    check_kv,
    kv_choices,
    kv_mixes,
)
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate, with_program
from sppo.planning.search.placement_choice import place
from sppo.planning.search.policy_inputs import policy_inputs
from sppo.planning.search.shortfall import find_shortfall

_ATTEMPTS = 3
"""Most programs of a candidate that are made, each with less memory for activations."""


def evaluate_candidate(
    candidate: Candidate, *, seconds: StageSeconds | None = None
) -> EvaluatedCandidate:
    """Place the activations of a candidate, price it, and find out whether it fits.

    Args:
        candidate: Candidate to evaluate.
        seconds: Seconds of the candidate's units, with everything retained; None to compute them.

    Raises:
        ValueError: There are more stages than layers, or the machine does not support the policy,
            or the placement of K and V.
    """
    seconds = seconds or stage_seconds(candidate)
    if candidate.kv is None:
        return _with_best_kv(candidate, seconds=seconds)
    check_kv(candidate)
    found = _with_whole_units(candidate, seconds=seconds)
    check_inputs_retained(candidate, found.placement)
    if candidate.schedule != "sppo_msp":
        return found
    return fitted_to_program(
        found,
        with_program=with_program,
        evaluate=lambda less: _with_whole_units(less, seconds=seconds),
    )


def _with_whole_units(candidate: Candidate, *, seconds: StageSeconds) -> EvaluatedCandidate:
    """Place the activations of a candidate whose ranks run their own units whole."""
    states = memory_without_activations(candidate)
    inputs = policy_inputs(
        candidate,
        seconds=seconds,
        in_flight=_most_tokens_in_flight(candidate),
        states=states,
    )
    evaluate = partial(_with_memory, candidate, seconds, states=states)
    return place(candidate, seconds=seconds, inputs=inputs, evaluate=evaluate)


def fitted_to_program(
    evaluated: EvaluatedCandidate,
    *,
    with_program: Callable[[EvaluatedCandidate], EvaluatedCandidate],
    evaluate: Callable[[Candidate], EvaluatedCandidate],
) -> EvaluatedCandidate:
    """Return a candidate with the memory of its program, evaluated again while it does not fit.

    Only a program shows what is held at once where units are cut, or messages wait. Each time the
    candidate has as much less memory for its activations. If it never fits, it is returned with
    what it lacks.

    Args:
        evaluated: Candidate with its memory without a program.
        with_program: Function that returns it with the memory of its program.
        evaluate: Function that evaluates the candidate with less memory, without a program.
    """
    candidate = evaluated.candidate
    spare = candidate.spare_bytes
    for _ in range(_ATTEMPTS):
        found = with_program(evaluated)
        if found.shortfall is None or evaluated.shortfall is not None:
            break
        added = max(
            after.device.total_bytes - without.device.total_bytes
            for without, after in zip(evaluated.memory, found.memory, strict=True)
        )
        more = found.shortfall.short_bytes * 5 // 4
        spare = max(spare + more, candidate.spare_bytes + added)
        evaluated = replace(evaluate(replace(candidate, spare_bytes=spare)), candidate=candidate)
    return found


def _with_best_kv(candidate: Candidate, *, seconds: StageSeconds) -> EvaluatedCandidate:
    """Evaluate a candidate with the placements of K and V; return the fastest that fits.

    Retaining and offloading are tried first, recomputing only if neither fits, and recomputing on
    some stages only if nothing else fits. If no placement can fit, offloading is evaluated, or
    recomputing without a tier: these need less memory than retaining. If none fits, the first that
    lacks least memory is returned.
    """
    choices = [replace(candidate, kv=kv) for kv in kv_choices(candidate)]
    found: list[EvaluatedCandidate] = []
    for choice in [one for one in choices if may_fit(one)] or choices[1:2] or choices:
        if choice.kv == "recomputed" and any(one.shortfall is None for one in found):
            break
        found.append(evaluate_candidate(choice, seconds=seconds))
    if all(one.shortfall is not None for one in found):
        states = memory_without_activations(replace(candidate, kv="offloaded"))
        mixes = filter(may_fit, kv_mixes(candidate, states))
        found += [evaluate_candidate(mixed, seconds=seconds) for mixed in mixes]
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
    found = _with_memory(
        candidate,
        stage_seconds(candidate),
        placement,
        states=memory_without_activations(candidate),
    )
    return with_program(found) if candidate.schedule == "sppo_msp" else found


def _with_memory(
    candidate: Candidate,
    seconds: StageSeconds,
    placement: ActivationPlacement,
    *,
    states: tuple[StageMemory, ...],
) -> EvaluatedCandidate:
    """Return a candidate with a placement, and its memory if ranks run their own units whole."""
    memory = with_placement(states, candidate=candidate, placement=placement)
    shortfall = find_shortfall(candidate, memory)
    return EvaluatedCandidate(candidate, seconds, placement, memory, shortfall)


def _most_tokens_in_flight(candidate: Candidate) -> Counts:
    """Return how often each unit is held when a rank holds most tokens, at least 1, [stages, N].

    A unit that is not held at that moment is held at another. Each unit of a single sequence, or
    of packed sequences, whose units are numbered through, is held at most once.
    """
    shape = candidate.num_stages, len(candidate.lengths)
    if candidate.sequences == 1:
        return np.ones(shape, dtype=np.int64)
    tokens = np.broadcast_to(np.array(candidate.lengths, dtype=np.float64), shape)
    return np.maximum(walk_of(candidate).counts(tokens), 1)
