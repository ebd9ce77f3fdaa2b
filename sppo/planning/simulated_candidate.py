"""A candidate that fits, and its simulation."""

from __future__ import annotations

from dataclasses import replace

from sppo.cost.candidate import Candidate
from sppo.planning.evaluated_candidate import EvaluatedCandidate
from sppo.schedule.actions import Schedule
from sppo.schedule.costs import Costs
from sppo.schedule.program import step_program
from sppo.schedule.simulate import simulate


def simulate_candidate(evaluated: EvaluatedCandidate) -> EvaluatedCandidate:
    """Return the evaluated candidate with its simulated step."""
    program = candidate_program(evaluated.candidate, costs=evaluated.costs)
    timeline = simulate(program, costs=evaluated.costs)
    return replace(evaluated, timeline=timeline)


def candidate_program(
    candidate: Candidate, *, costs: Costs, forward_only: bool = False
) -> Schedule:
    """Make the program of a step of one data-parallel replica of `candidate`.

    Args:
        candidate: What would be run.
        costs: Of the candidate.
        forward_only: Leave out backwards, copies and reductions.

    Raises:
        ValueError: A schedule that cannot serve the candidate.
    """
    return step_program(
        candidate.schedule,
        num_ranks=candidate.pipeline_parallel_degree,
        lengths=(candidate.lengths,) * candidate.sequences,
        forward_only=forward_only,
        costs=costs,
    )
