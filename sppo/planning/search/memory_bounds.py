"""Lower bounds of the memory that a candidate lacks, whatever its activation policy places."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from sppo.cost.candidate import Candidate
from sppo.cost.memory.stage_memory import StageMemory, state_memory
from sppo.cost.memory.units_in_flight import UnitsInFlight
from sppo.planning.search.candidate_checks import kv_choices
from sppo.planning.search.shortfall import Shortfall, find_shortfall


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
    shortfall = find_shortfall(candidate, memory_without_activations(candidate))
    return None if shortfall is None else replace(shortfall, at_least=True)


@lru_cache(maxsize=512)
def memory_without_activations(candidate: Candidate) -> tuple[StageMemory, ...]:
    """Return the memory of each rank without saved activations and working sets; cached."""
    return state_memory(candidate, units=UnitsInFlight(candidate))
