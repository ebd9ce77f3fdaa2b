"""A candidate that fits, and its simulation: how long a step takes, and what is held at once."""

from __future__ import annotations

from dataclasses import replace

from sppo.cost.memory.stage_memory import MemoryBuckets
from sppo.planning.candidate_program import candidate_program
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.schedule.costs import Costs
from sppo.schedule.simulation.played_step import played_step
from sppo.schedule.simulation.simulate import simulate
from sppo.schedule.simulation.whole_units import play_whole_units

_IN_TIMELINES = ("kv_bytes", "kv_gradients_bytes", "activations_bytes", "never_at_once_bytes")
"""Buckets that a simulation follows; the others do not change during a step."""


def simulate_candidate(evaluated: EvaluatedCandidate) -> EvaluatedCandidate:
    """Return the evaluated candidate with its simulated step."""
    candidate, costs = evaluated.candidate, evaluated.costs
    if candidate.schedule == "sppo_msp" or _copies_stages(costs):
        program = evaluated.program or candidate_program(candidate, costs=costs)
        timeline = simulate(program, costs=costs)
        return replace(evaluated, played=played_step(timeline), program=program)
    played = play_whole_units(
        candidate.schedule,
        num_ranks=candidate.pipeline_parallel_degree,
        lengths=candidate.sequence_lengths,
        costs=costs,
        num_virtual=candidate.virtual_stages,
        pipelines=candidate.pipelines,
    )
    return replace(evaluated, played=played)


def _copies_stages(costs: Costs) -> bool:
    """Whether K and V, weights or gradients come and go, or K and V are recomputed."""
    tables = (
        costs.kv_offload_bytes,
        costs.kv_recompute_s,
        costs.streamed_weight_bytes,
        costs.streamed_gradient_bytes,
    )
    return any(bool(table.any()) for table in tables)


def simulated_device_bytes(evaluated: EvaluatedCandidate) -> tuple[int, ...] | None:
    """Peak of one device of each rank as simulated; None where nothing was simulated.

    Never above the memory of the evaluated candidate, which adds up the peaks of all buckets.
    """
    if evaluated.played is None:
        return None
    return tuple(
        steady_bytes(stage.device) + round(held)
        for held, stage in zip(evaluated.played.held_bytes.tolist(), evaluated.memory, strict=True)
    )


def steady_bytes(device: MemoryBuckets) -> int:
    """What a simulation does not follow: state, room for copies, and what runs beside what is held.

    Of what runs it counts as much as the peak of both together exceeds the peak of what is held.
    """
    return device.total_bytes - sum(int(getattr(device, name)) for name in _IN_TIMELINES)
