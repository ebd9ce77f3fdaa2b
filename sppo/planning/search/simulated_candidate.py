"""Simulation of an evaluated candidate: time of a step, and memory held at once."""

from __future__ import annotations

from dataclasses import replace

from sppo.cost.memory.stage_memory import MemoryBuckets
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.schedule.simulation.simulated_step import simulate_step

_IN_TIMELINES = ("kv_bytes", "kv_gradients_bytes", "activations_bytes")
"""Memory buckets that a simulation tracks over time; the others are constant during a step."""


def simulate_candidate(evaluated: EvaluatedCandidate) -> EvaluatedCandidate:
    """Return the evaluated candidate with its step simulated, unless it already is."""
    if evaluated.simulated is not None:
        return evaluated
    costs = evaluated.costs
    program = evaluated.program or evaluated.candidate.program(costs, messages=False)
    return replace(evaluated, simulated=simulate_step(program, costs=costs))


def simulated_device_bytes(evaluated: EvaluatedCandidate) -> tuple[int, ...] | None:
    """Return the simulated peak bytes of one device of each rank; None without a simulation.

    At most the memory of the evaluated candidate.
    """
    if evaluated.simulated is None:
        return None
    return tuple(
        steady_bytes(stage.device) + round(held)
        for held, stage in zip(
            evaluated.simulated.held_bytes.tolist(), evaluated.memory, strict=True
        )
    )


def steady_bytes(device: MemoryBuckets) -> int:
    """Return the bytes that a simulation does not track: state, slots of copies, working sets.

    The working set counts by as much as it raises the peak of what is held.
    """
    return device.total_bytes - sum(int(getattr(device, name)) for name in _IN_TIMELINES)
