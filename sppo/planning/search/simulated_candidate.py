"""Simulation of an evaluated candidate: time of a step, and memory held at once."""

from __future__ import annotations

from dataclasses import replace

from sppo.cost.memory.stage_memory import MemoryBuckets
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.schedule.simulation.simulated_step import simulate_step

_IN_TIMELINES = ("kv_bytes", "kv_gradients_bytes", "activations_bytes")
"""Memory buckets that a simulation tracks over time; the others are constant during a step."""


_QUICK_UNITS = 20_000
"""Stages x units that are simulated in a tenth of a second; an eighth of this if weights or
gradients are copied, or K and V are copied or recomputed."""


def simulate_candidate(evaluated: EvaluatedCandidate) -> EvaluatedCandidate:
    """Return the evaluated candidate with its step simulated, unless it already is."""
    if evaluated.simulated is not None:
        return evaluated
    costs = evaluated.costs
    program = evaluated.program or evaluated.candidate.program(costs, messages=False)
    return replace(evaluated, simulated=simulate_step(program, costs=costs))


def simulated_if_inexact(evaluated: EvaluatedCandidate) -> EvaluatedCandidate:
    """Return a candidate, simulated if its closed form may be inexact and a simulation is quick.

    The candidate must fit.
    """
    if evaluated.has_exact_time or not is_quick(evaluated):
        return evaluated
    return simulate_candidate(evaluated)


def is_quick(evaluated: EvaluatedCandidate) -> bool:
    """Return whether a candidate can be simulated in a fraction of a second.

    False for MSP, whose programs take long to make.
    """
    costs = evaluated.costs
    most = _QUICK_UNITS // 8 if costs.copies_stages else _QUICK_UNITS
    return evaluated.candidate.schedule != "sppo_msp" and costs.forward_s.size <= most


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
