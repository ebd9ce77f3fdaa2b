"""Memory of a simulated candidate: what its schedule really holds at once, beside the closed form.

The closed form counts what is in flight at most; the simulation follows every unit, copy and MSP
shard. Where the two differ, the simulation is what a run would see.
"""

from __future__ import annotations

from dataclasses import replace

from sppo.cost.memory import MemoryBuckets
from sppo.planning.evaluated_candidate import EvaluatedCandidate, assess
from sppo.planning.simulated_candidate import simulate_candidate

_IN_TIMELINES = ("kv_bytes", "kv_gradients_bytes", "activations_bytes", "copies_bytes")
"""Buckets that a simulation follows; the others do not change during a step."""
_ATTEMPTS = 4


def simulated_device_bytes(evaluated: EvaluatedCandidate) -> tuple[int, ...] | None:
    """Peak of one device of each stage as simulated; None where nothing was simulated."""
    if evaluated.timeline is None:
        return None
    return tuple(
        _steady_bytes(held.device) + round(track.memory["total"].peak_bytes)
        for track, held in zip(evaluated.timeline.ranks, evaluated.memory, strict=True)
    )


def simulated_excess(evaluated: EvaluatedCandidate) -> tuple[int, int] | None:
    """The fullest stage and its bytes as simulated, where that is over the budget."""
    peaks = simulated_device_bytes(evaluated)
    if peaks is None:
        return None
    peak, stage = max((peak, stage) for stage, peak in enumerate(peaks))
    budget = evaluated.candidate.workload.hardware.device.usable_bytes
    return (stage, peak) if peak > budget else None


def simulate_within_budget(evaluated: EvaluatedCandidate) -> EvaluatedCandidate | None:
    """Return the simulated candidate, with more memory left free if its simulation needs it.

    None if even that does not fit.
    """
    for _ in range(_ATTEMPTS):
        simulated = simulate_candidate(evaluated)
        excess = simulated_excess(simulated)
        if excess is None:
            return simulated
        candidate = simulated.candidate
        over = excess[1] - candidate.workload.hardware.device.usable_bytes
        spare = candidate.spare_bytes + over + over // 4
        evaluated = assess(replace(candidate, spare_bytes=spare))
        if evaluated.shortfall is not None:
            return None
    return None


def _steady_bytes(device: MemoryBuckets) -> int:
    return device.total_bytes - sum(int(getattr(device, name)) for name in _IN_TIMELINES)
