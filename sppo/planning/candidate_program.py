"""The program of a step of a candidate: the one that is simulated, planned and executed."""

from __future__ import annotations

from sppo.cost.candidate import Candidate
from sppo.schedule.actions import Schedule
from sppo.schedule.costs import Costs
from sppo.schedule.program import step_program


def candidate_program(
    candidate: Candidate, *, costs: Costs, forward_only: bool = False, messages: bool = True
) -> Schedule:
    """Make the program of a step of one data-parallel replica of `candidate`.

    Args:
        candidate: What would be run.
        costs: Of the candidate.
        forward_only: Leave out backwards, copies and reductions.
        messages: Place messages; a simulation needs none.

    Raises:
        ValueError: A schedule that cannot serve the candidate.
    """
    return step_program(
        candidate.schedule,
        num_ranks=candidate.pipeline_parallel_degree,
        num_virtual=candidate.virtual_stages,
        begun=candidate.begun,
        lengths=candidate.sequence_lengths,
        forward_only=forward_only,
        costs=costs,
        messages=messages,
    )
