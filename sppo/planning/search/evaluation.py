"""Evaluation of a candidate: the fastest placement of K and V and of its activations that fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from sppo.activations.hybrid import choices, least_memory
from sppo.activations.placement import ActivationPlacement
from sppo.activations.policy import POLICIES, decide, decide_ratio
from sppo.activations.policy_inputs import PolicyInputs
from sppo.cost.candidate import Candidate
from sppo.planning.search.bounds import may_fit
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate, has_own_memory
from sppo.planning.search.kv_choices import check_kv, kv_choices
from sppo.planning.search.policy_inputs import policy_inputs, tier_room_bytes
from sppo.schedule.costs import Table

WORTH_IT = 0.99
"""Fraction of the step time at or below which a choice is taken that costs something else: several
stages on a rank, longer subsequences than usual, another schedule, or host memory. Predictions are
not exact enough for smaller gains to count, and simpler programs are better to run."""
_ATTEMPTS = 8
"""Most times that activations are placed, each time with as much less room as they lacked."""
_BISECTIONS = 3
"""Number of limits tried: the host memory is the least to an eighth of what the fastest takes."""


def evaluate_candidate(candidate: Candidate) -> EvaluatedCandidate:
    """Place the activations of a candidate, and find out whether it fits.

    If the placement of K and V is open, the fastest that fits is taken of retaining and offloading;
    recomputing on all or some stages only if neither fits, and in layers with a sliding window if
    otherwise saved tensors are recomputed. If nothing fits, the first placement that lacks least
    memory is returned.

    Args:
        candidate: Candidate to evaluate.

    Raises:
        ValueError: There are more stages than layers, or the machine does not support the policy,
            or the placement of K and V.
    """
    found: list[EvaluatedCandidate] = []
    for choice in filter(may_fit, kv_choices(candidate)):
        fitting = [one for one in found if one.shortfall is None]
        if fitting and "recomputed" in choice.kv_of_stages:
            break
        if choice.windowed_kv == "recomputed" and not all(
            one.placement.recomputed.any() for one in fitting
        ):
            break
        found.append(_placed(choice))
    # Retaining needs more memory than the second choice.
    found = found or [_placed(choice) for choice in [*kv_choices(candidate)][:2][-1:]]
    fitting = [one for one in found if one.shortfall is None]
    if len(fitting) > 1:
        return min(fitting, key=lambda one: one.time.step_s)
    return fitting[0] if fitting else min(found, key=lambda one: one.short_bytes)


def with_less_host_memory(evaluated: EvaluatedCandidate) -> EvaluatedCandidate:
    """Return a candidate with activations placed in less host memory if that costs up to 1 %.

    Of placements that offload, the fastest fill the tier, the last half of it for a gain smaller
    than predictions are exact. Closed forms are compared; the step is simulated once more.

    Args:
        evaluated: Candidate. Returned unchanged if it does not fit or puts no activations in host
            memory, if the run fixes what is offloaded, or if units are cut (MSP), which takes long.
    """
    candidate = evaluated.candidate
    is_fixed = not _is_free(candidate) or candidate.schedule == "sppo_msp"
    in_host = candidate.tier == "host" and evaluated.placement.offloads_anything
    if is_fixed or not in_host or evaluated.shortfall is not None:
        return evaluated
    found, most_s = evaluated, evaluated.time.step_s / WORTH_IT
    least, most = 0, evaluated.host_peak_bytes
    for _ in range(_BISECTIONS):
        middle = (least + most) // 2
        limited = evaluate_candidate(_limited(candidate, middle))
        if limited.shortfall is None and limited.time.step_s <= most_s:
            found, most = replace(limited, candidate=candidate), middle
        else:
            least = middle
    return found if found.step_s <= evaluated.step_s / WORTH_IT else evaluated


def _limited(candidate: Candidate, host_bytes: int) -> Candidate:
    """Return a candidate on a machine with `host_bytes` of host memory for each device."""
    workload = candidate.workload
    hardware = workload.hardware
    node = replace(hardware.node, host_memory_bytes=host_bytes * hardware.node.num_devices)
    return replace(candidate, workload=replace(workload, hardware=replace(hardware, node=node)))


def _placed(candidate: Candidate) -> EvaluatedCandidate:
    """Return a candidate with the fastest placement that fits; if none does, with the nearest.

    Working sets, and the moment at which a rank holds most, depend on the placement. So the policy
    decides as if the device had room for everything, and again as long as its placement does not
    fit, with as much less room as it lacked. If that is not enough, because the policy frees memory
    at other moments than the fullest, the room decreases faster and faster.

    Backward joins parts of tensors, and with layers that share an input it joins those of all at
    once. So where tensors are recomputed, placements that treat all subsequences alike may fit and
    be faster: they are compared.

    A program takes long to make, so memory is counted from it once a placement fits without.
    """
    check_kv(candidate)
    evaluated = partial(EvaluatedCandidate, candidate, counts_program=not has_own_memory(candidate))
    inputs = policy_inputs(candidate)
    if not _is_free(candidate):
        return _in_program(evaluated(_fixed_placement(candidate, inputs)))
    compared: list[EvaluatedCandidate] = []
    for attempt in range(_ATTEMPTS):
        placed = [evaluated(one) for one in choices(inputs)]
        if not placed:
            break
        found = placed[0] if len(placed) == 1 else min(placed, key=lambda one: one.time.step_s)
        if found.shortfall is None:
            found = _in_program(found)
        if found.shortfall is None:
            if not found.placement.recomputed.any():
                return found
            compared.append(found)
            break
        inputs = _with_less_room(inputs, found, times=2 ** max(0, attempt - 2))
    most_s = compared[0].time.step_s if compared else np.inf
    uniform = map(evaluated, _uniform(candidate, inputs))
    faster = [one for one in uniform if one.time.step_s < most_s]
    compared += map(_in_program, faster) if compared else faster
    best = min(compared, key=lambda one: (one.short_bytes, one.time.step_s))
    return _in_program(best)


def _in_program(found: EvaluatedCandidate) -> EvaluatedCandidate:
    """Return a candidate with its memory in its program, unless it lacks some without it anyway.

    Under MSP a program may hold less than is counted without.
    """
    if found.shortfall is not None and found.candidate.schedule != "sppo_msp":
        return found
    return found if found.counts_program else replace(found, counts_program=True)


def _is_free(candidate: Candidate) -> bool:
    """Return whether the policy chooses what is offloaded and recomputed."""
    return candidate.policy == "hybrid" and candidate.offload_ratio is None


def _fixed_placement(candidate: Candidate, inputs: PolicyInputs) -> ActivationPlacement:
    """Return the placement of a policy that has no choice."""
    policy, ratio = candidate.policy, candidate.offload_ratio
    if ratio is None:
        return decide(policy, inputs)
    if ratio > 0 and policy in POLICIES:
        raise ValueError(
            f"activations.offload_ratio {ratio:g} with activations.policy {policy!r}, which "
            "offloads nothing: leave one of the two keys out"
        )
    return decide_ratio(inputs, ratio=ratio)


def _uniform(candidate: Candidate, inputs: PolicyInputs) -> Iterator[ActivationPlacement]:
    """Yield the placement of least memory, and those that treat all subsequences alike.

    Which of them needs least memory is not known in advance, because copies take some themselves.
    """
    yield least_memory(inputs)
    yield decide("recompute", inputs)
    yield decide("keep_attention", inputs)
    if inputs.copy_bytes_per_s > 0 and not candidate.kv_recomputed:
        yield decide("offload_all", inputs)


def _with_less_room(inputs: PolicyInputs, found: EvaluatedCandidate, *, times: int) -> PolicyInputs:
    """Return the inputs with less memory on each rank: `times` as much less as it lacked.

    A rank whose units are cut lacks memory for shards of other ranks, too: then all have less.
    """
    budget = found.candidate.budget_bytes
    lacks = np.array([float(rank.device.total_bytes) - budget for rank in found.memory])
    if found.candidate.schedule == "sppo_msp" and found.counts_program:
        lacks[:] = lacks.max()
    lacks_tier = -tier_room_bytes(found.candidate, found.memory)
    needed, in_tier = inputs.needed(found.placement), inputs.needed_in_tier(found.placement)
    return replace(
        inputs,
        device_bytes=_less(inputs.device_bytes, needed, times * lacks),
        tier_bytes=_less(inputs.tier_bytes, in_tier, times * lacks_tier),
    )


def _less(room: Table, needed: Table, lacks: Table) -> Table:
    """Return the room, and where bytes are lacking at most what was needed without these."""
    less: Table = np.maximum(0.0, np.minimum(room, needed - lacks))
    return np.where(lacks > 0, less, room)
