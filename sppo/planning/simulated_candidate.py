"""A candidate that fits, and its simulation: when everything happens, and what is held at once."""

from __future__ import annotations

from dataclasses import replace

from sppo.cost.memory import MemoryBuckets
from sppo.planning.candidate_program import candidate_program
from sppo.planning.evaluated_candidate import EvaluatedCandidate
from sppo.schedule.simulate import simulate

_IN_TIMELINES = ("kv_bytes", "kv_gradients_bytes", "activations_bytes")
"""Buckets that a simulation follows; the others do not change during a step."""


def simulate_candidate(evaluated: EvaluatedCandidate) -> EvaluatedCandidate:
    """Return the evaluated candidate with its simulated step."""
    program = candidate_program(evaluated.candidate, costs=evaluated.costs)
    timeline = simulate(program, costs=evaluated.costs)
    return replace(evaluated, timeline=timeline)


def simulated_device_bytes(evaluated: EvaluatedCandidate) -> tuple[int, ...] | None:
    """Peak of one device of each stage as simulated; None where nothing was simulated.

    Never above the memory of the evaluated candidate, which adds up the peaks of all buckets.
    """
    if evaluated.timeline is None:
        return None
    return tuple(
        steady_bytes(held.device) + round(track.memory["total"].peak_bytes)
        for track, held in zip(evaluated.timeline.ranks, evaluated.memory, strict=True)
    )


def steady_bytes(device: MemoryBuckets) -> int:
    """What is on a device throughout a step, whatever runs."""
    return device.total_bytes - sum(int(getattr(device, name)) for name in _IN_TIMELINES)
