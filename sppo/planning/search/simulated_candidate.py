"""A candidate that fits, and its simulation: how long a step takes, and what is held at once."""

from __future__ import annotations

from dataclasses import replace

from sppo.cost.memory.stage_memory import MemoryBuckets
from sppo.planning.candidate_program import candidate_program
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.schedule.simulation.played_step import played_step
from sppo.schedule.simulation.simulate import simulate
from sppo.schedule.simulation.whole_units import play_whole_units

_IN_TIMELINES = ("kv_bytes", "kv_gradients_bytes", "activations_bytes", "never_at_once_bytes")
"""Buckets that a simulation follows; the others do not change during a step."""


_QUICK_UNITS = 20_000
"""Stages x units that are simulated in a tenth of a second; where stages are copied, an eighth."""


def simulate_candidate(evaluated: EvaluatedCandidate) -> EvaluatedCandidate:
    """Return the evaluated candidate with its simulated step."""
    candidate, costs = evaluated.candidate, evaluated.costs
    if evaluated.played is not None:
        return evaluated
    if candidate.schedule == "sppo_msp" or costs.copies_stages:
        program = evaluated.program or candidate_program(candidate, costs=costs, messages=False)
        return replace(evaluated, played=played_step(simulate(program, costs=costs)))
    played = play_whole_units(
        candidate.schedule,
        num_ranks=candidate.pipeline_parallel_degree,
        lengths=candidate.sequence_lengths,
        costs=costs,
        num_virtual=candidate.virtual_stages,
        begun=candidate.begun,
    )
    return replace(evaluated, played=played)


def judged_candidate(evaluated: EvaluatedCandidate) -> EvaluatedCandidate:
    """Return a candidate that fits, simulated if its closed form may be off and that is quick.

    Programs that cut units over ranks (MSP) take long to make.
    """
    if evaluated.is_judged or not is_quick(evaluated):
        return evaluated
    return simulate_candidate(evaluated)


def is_quick(evaluated: EvaluatedCandidate) -> bool:
    """Return whether a simulation of a candidate takes a fraction of a second."""
    costs = evaluated.costs
    most = _QUICK_UNITS // 8 if costs.copies_stages else _QUICK_UNITS
    return evaluated.candidate.schedule != "sppo_msp" and costs.forward_s.size <= most


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
    """Return what a simulation does not follow: state, room for copies, and what runs beside.

    Of what runs it counts as much as the peak of both together exceeds the peak of what is held.
    """
    return device.total_bytes - sum(int(getattr(device, name)) for name in _IN_TIMELINES)
