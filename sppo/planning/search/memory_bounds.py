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


def may_fit(candidate: Candidate) -> bool:
    """Return whether a candidate may fit under some activation policy: a quick, necessary check."""
    return least_shortfall(candidate) is None


def least_shortfall(candidate: Candidate) -> Shortfall | None:
    """Return a lower bound of what a candidate lacks under every placement; None if it may fit."""
    if candidate.kv is None:
        found = [least_shortfall(replace(candidate, kv=kv)) for kv in kv_choices(candidate)]
        lacking = [shortfall for shortfall in found if shortfall is not None]
        least = min(lacking, key=lambda shortfall: shortfall.short_bytes, default=None)
        return least if len(lacking) == len(found) else None
    if candidate.schedule == "sppo_msp":
        # A program that cuts units runs one sequence after another.
        candidate = replace(candidate, sequences=1)
    held = tuple(
        replace(state, device=replace(state.device, working_bytes=0, heap_bytes=0))
        for state in memory_without_activations(candidate)
    )
    shortfall = find_shortfall(candidate, held)
    return None if shortfall is None else replace(shortfall, at_least=True)


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
    """Return a lower bound of the bytes that the fullest device lacks with retained tensors.

    Operands of deferred weight gradients are included. Working set, heap and communication are left
    out, as these depend on the moment.

    Args:
        candidate: Candidate whose units run whole.
        retained: Bytes of each unit that are retained, [stages, N].
    """
    held = UnitsInFlight(candidate).peak_beside_kv(
        retained, deferred=weight_operand_bytes(candidate)
    )
    devices = (state.device for state in memory_without_activations(candidate))
    return (
        max(
            device.total_bytes
            - device.working_bytes
            - device.heap_bytes
            - device.communication_bytes
            - device.kv_bytes
            - device.kv_gradients_bytes
            + int(of_rank)
            for device, of_rank in zip(devices, held, strict=True)
        )
        - candidate.budget_bytes
    )
