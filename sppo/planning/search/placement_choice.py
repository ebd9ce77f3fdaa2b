"""Choice of the placement of a candidate's activations: the fastest that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from sppo.activations.hybrid import choices, least_memory
from sppo.activations.placement import ActivationPlacement
from sppo.activations.policy import POLICIES, decide, decide_ratio
from sppo.activations.policy_inputs import PolicyInputs
from sppo.cost.candidate import Candidate
from sppo.cost.stage_cost import StageSeconds, stage_costs
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate, closed_forms
from sppo.planning.search.policy_inputs import tier_room_bytes
from sppo.schedule.costs import Table

_ATTEMPTS = 8
"""Most times that activations are placed, each time with as much less room as they lacked."""


def place(
    candidate: Candidate,
    *,
    seconds: StageSeconds,
    inputs: PolicyInputs,
    evaluate: Callable[[ActivationPlacement], EvaluatedCandidate],
) -> EvaluatedCandidate:
    """Return the candidate with the fastest placement that fits; if none does, with the nearest.

    Working sets, and the moment at which a rank holds most, depend on the placement. So the policy
    decides as if the device had room for everything, and again as long as its placement does not
    fit, with as much less room as it lacked. If that is not enough, because the policy frees memory
    at other moments than the fullest, the room decreases faster and faster.

    Backward joins parts of tensors, and with layers that share an input it joins those of all at
    once. So where tensors are recomputed, placements that treat all subsequences alike may fit and
    be faster: they are compared.

    Args:
        candidate: Candidate whose activations are placed.
        seconds: Seconds of the candidate's units, with everything retained.
        inputs: Inputs of the activation policy.
        evaluate: Function that finds the memory of the candidate with a placement.
    """
    if not _is_free_to_choose(candidate):
        return evaluate(_fixed_placement(candidate, inputs))
    placed = None
    for attempt in range(_ATTEMPTS):
        placements = [*choices(inputs)]
        if not placements:
            break
        found = evaluate(_fastest(candidate, placements, seconds=seconds))
        if found.shortfall is None:
            placed = found
            break
        inputs = _with_less_room(inputs, found, times=2 ** max(0, attempt - 2))
    if placed is not None and not placed.placement.recomputed.any():
        return placed
    uniform = [*_uniform(candidate, inputs)]
    if placed is None:
        compared = [*map(evaluate, uniform)]
    else:
        times = _closed_forms(candidate, uniform, seconds=seconds)
        faster = [
            one for one, time in zip(uniform, times, strict=True) if time < placed.time.step_s
        ]
        compared = [placed, *map(evaluate, faster)]
    return min(compared, key=lambda one: (one.short_bytes, one.time.step_s))


def _is_free_to_choose(candidate: Candidate) -> bool:
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


def _fastest(
    candidate: Candidate, placements: Sequence[ActivationPlacement], *, seconds: StageSeconds
) -> ActivationPlacement:
    """Return the first of the fastest placements, by the closed form."""
    if len(placements) == 1:
        return placements[0]
    step_s = _closed_forms(candidate, placements, seconds=seconds)
    return placements[step_s.index(min(step_s))]


def _closed_forms(
    candidate: Candidate, placements: Sequence[ActivationPlacement], *, seconds: StageSeconds
) -> list[float]:
    """Return the step time with each placement, by the closed form."""
    costs = [stage_costs(candidate, seconds=seconds, placement=one) for one in placements]
    return [time.step_s for time in closed_forms(candidate, costs)]


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
    """Return the inputs with less memory on each rank: `times` as much less as it lacked."""
    budget = found.candidate.budget_bytes
    lacks = np.array([float(rank.device.total_bytes) - budget for rank in found.memory])
    lacks_tier = -tier_room_bytes(found.candidate, found.memory)
    return replace(
        inputs,
        device_bytes=_less(inputs.device_bytes, inputs.needed(found.placement), times * lacks),
        tier_bytes=_less(
            inputs.tier_bytes, inputs.needed_in_tier(found.placement), times * lacks_tier
        ),
    )


def _less(room: Table, needed: Table, lacks: Table) -> Table:
    """Return the room, and where bytes are lacking at most what was needed without these."""
    less: Table = np.maximum(0.0, np.minimum(room, needed - lacks))
    return np.where(lacks > 0, less, room)
