"""Memory of a simulated option: what its schedule really holds at once, beside the closed form.

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


def simulated_device_bytes(option: EvaluatedCandidate) -> tuple[int, ...] | None:
    """Peak of one device of each stage as simulated; None where nothing was simulated."""
    if option.timeline is None:
        return None
    return tuple(
        _steady_bytes(held.device) + round(track.memory["total"].peak_bytes)
        for track, held in zip(option.timeline.ranks, option.memory, strict=True)
    )


def simulated_excess(option: EvaluatedCandidate) -> tuple[int, int] | None:
    """The fullest stage and its bytes as simulated, where that is over the budget."""
    peaks = simulated_device_bytes(option)
    if peaks is None:
        return None
    peak, stage = max((peak, stage) for stage, peak in enumerate(peaks))
    budget = option.candidate.workload.hardware.device.usable_bytes
    return (stage, peak) if peak > budget else None


def simulate_within_budget(option: EvaluatedCandidate) -> EvaluatedCandidate | None:
    """The simulated option; with more memory left free where its simulation needs it.

    None where even that does not fit.
    """
    for _ in range(_ATTEMPTS):
        option = simulate_candidate(option)
        excess = simulated_excess(option)
        if excess is None:
            return option
        candidate = option.candidate
        over = excess[1] - candidate.workload.hardware.device.usable_bytes
        spare = candidate.spare_bytes + over + over // 4
        assessment = assess(replace(candidate, spare_bytes=spare))
        if assessment.shortfall is not None:
            return None
        option = assessment
    return None


def _steady_bytes(device: MemoryBuckets) -> int:
    return device.total_bytes - sum(int(getattr(device, name)) for name in _IN_TIMELINES)
