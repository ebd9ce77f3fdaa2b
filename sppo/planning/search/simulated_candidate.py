"""Simulation of an evaluated candidate: time of a step, and memory held at once."""

from __future__ import annotations

from dataclasses import replace

from sppo.cost.memory.stage_memory import MemoryBuckets
from sppo.planning.candidate_program import candidate_program
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.schedule.simulation.simulate import simulate
from sppo.schedule.simulation.simulated_step import simulated_step
from sppo.schedule.simulation.whole_units import simulate_whole_units

_IN_TIMELINES = ("kv_bytes", "kv_gradients_bytes", "activations_bytes", "never_at_once_bytes")
"""Memory buckets that a simulation tracks over time; the others are constant during a step."""


def simulate_candidate(evaluated: EvaluatedCandidate) -> EvaluatedCandidate:
    """Return the evaluated candidate with its step simulated, unless it already is."""
    candidate, costs = evaluated.candidate, evaluated.costs
    if evaluated.simulated is not None:
        return evaluated
    if candidate.schedule == "sppo_msp" or costs.copies_stages:
        program = evaluated.program or candidate_program(candidate, costs=costs, messages=False)
        return replace(evaluated, simulated=simulated_step(simulate(program, costs=costs)))
    simulated = simulate_whole_units(
        candidate.schedule,
        num_ranks=candidate.pipeline_parallel_degree,
        lengths=candidate.sequence_lengths,
        costs=costs,
        num_virtual=candidate.virtual_stages,
        forwards_before_backward=candidate.forwards_before_backward,
    )
    return replace(evaluated, simulated=simulated)


def simulated_device_bytes(evaluated: EvaluatedCandidate) -> tuple[int, ...] | None:
    """Return the simulated peak bytes of one device of each rank; None without a simulation.

    At most the memory of the evaluated candidate, which adds up the peaks of all buckets.
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
