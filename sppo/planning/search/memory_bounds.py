"""Lower bounds of the memory that a candidate lacks, whatever its activation policy places."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from sppo.activations.placement import ActivationPlacement
from sppo.cost.candidate import Candidate
from sppo.cost.deferred_weights import weight_operand_bytes
from sppo.cost.memory.stage_memory import StageMemory, state_memory
from sppo.cost.memory.units_in_flight import UnitsInFlight
from sppo.cost.stage_cost import placed_bytes
from sppo.cost.values_of_ranks import of_ranks
from sppo.planning.search.candidate_checks import kv_choices
from sppo.planning.search.policy_inputs import tier_room_bytes
from sppo.planning.search.shortfall import Shortfall, find_shortfall
from sppo.schedule.costs import Table


def leaves_room(candidate: Candidate) -> bool:
    """Return whether a candidate fits without saved activations: a quick necessary condition."""
    if candidate.kv is None:
        return any(leaves_room(replace(candidate, kv=kv)) for kv in kv_choices(candidate))
    budget = candidate.budget_bytes
    return all(
        state.device.total_bytes <= budget for state in memory_without_activations(candidate)
    )


def may_fit(candidate: Candidate) -> bool:
    """Return whether a candidate may fit under some activation policy: a quick, necessary check."""
    return least_short_bytes(candidate) <= 0


def least_short_bytes(candidate: Candidate) -> int:
    """Return a lower bound of the bytes that a candidate lacks; above 0 if no placement fits."""
    if candidate.kv is None:
        choices = (replace(candidate, kv=kv) for kv in kv_choices(candidate))
        return min(map(least_short_bytes, choices))
    if candidate.schedule == "sppo_msp":
        # A program that cuts units runs one sequence after another.
        candidate = replace(candidate, sequences=1)
    return short_beside(candidate, states=memory_without_activations(candidate))


def least_shortfall(candidate: Candidate) -> Shortfall:
    """Return a lower bound of what a candidate lacks that cannot fit under any placement.

    The candidate is one of which :func:`least_short_bytes` is above 0.
    """
    if candidate.kv is None:
        choices = [replace(candidate, kv=kv) for kv in kv_choices(candidate)]
        return least_shortfall(min(choices, key=least_short_bytes))
    if candidate.schedule == "sppo_msp":
        candidate = replace(candidate, sequences=1)
    held = tuple(
        replace(state, device=replace(state.device, working_bytes=0, heap_bytes=0))
        for state in memory_without_activations(candidate)
    )
    found = find_shortfall(candidate, held)
    assert found is not None, "only asked of what cannot fit"
    return replace(found, at_least=True)


@lru_cache(maxsize=512)
def memory_without_activations(candidate: Candidate) -> tuple[StageMemory, ...]:
    """Return the memory of each rank without saved activations; cached."""
    return state_memory(candidate, units=UnitsInFlight(candidate))


def short_beside(candidate: Candidate, *, states: tuple[StageMemory, ...]) -> int:
    """Return the bytes that the fullest device lacks under every placement; below 0 if none.

    Working set and heap are left out, as these depend on the placement.
    """
    devices = (state.device for state in states)
    fullest = max(
        device.total_bytes - device.working_bytes - device.heap_bytes for device in devices
    )
    return fullest - candidate.budget_bytes


def least_short_of_placement(candidate: Candidate, placement: ActivationPlacement) -> float:
    """Return a lower bound of the bytes that a device, or its share of the tier, lacks.

    For units that run whole, without those that MSP cuts. Minus infinity for packed sequences, not
    all of whose units are held at once.
    """
    if candidate.packed:
        return -math.inf
    retained, offloaded = (
        placed_bytes(placement, name, candidate=candidate) for name in ("retained", "offloaded")
    )
    in_tier = of_ranks(candidate, offloaded.sum(axis=1) * UnitsInFlight(candidate).sequences)
    lacks_tier = in_tier - tier_room_bytes(candidate, memory_without_activations(candidate))
    return max(_short_beside_retained(candidate, retained), float(lacks_tier.max()))


def _short_beside_retained(candidate: Candidate, retained: Table) -> int:
    """Return a lower bound of the bytes that the fullest device lacks beside retained tensors.

    Operands of deferred weight gradients are included. Working set, heap and communication are left
    out, as these depend on the moment.

    Args:
        candidate: Candidate whose units run whole.
        retained: Bytes of each unit that are retained, [stages, N].
    """
    held = UnitsInFlight(candidate).peak(retained, deferred=weight_operand_bytes(candidate))
    devices = (state.device for state in memory_without_activations(candidate))
    return (
        max(
            device.total_bytes
            - device.working_bytes
            - device.heap_bytes
            - device.communication_bytes
            + int(of_rank)
            for device, of_rank in zip(devices, held, strict=True)
        )
        - candidate.budget_bytes
    )
