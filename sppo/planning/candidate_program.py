"""Program of one step of a candidate, which is simulated, planned and executed."""

from __future__ import annotations

from sppo.cost.candidate import Candidate
from sppo.schedule.costs import Costs
from sppo.schedule.program import step_program
from sppo.schedule.schedule import Schedule


def candidate_program(
    candidate: Candidate, *, costs: Costs, forward_only: bool = False, messages: bool = True
) -> Schedule:
    """Return the program of one step of one data-parallel replica of `candidate`.

    Args:
        candidate: Candidate to run.
        costs: Costs of the candidate's actions.
        forward_only: Whether to leave out backwards, copies and reductions.
        messages: Whether to place messages; a simulation needs none.

    Raises:
        ValueError: The schedule does not support the candidate.
    """
    return step_program(
        candidate.schedule,
        num_ranks=candidate.pipeline_parallel_degree,
        num_virtual=candidate.virtual_stages,
        forwards_before_backward=candidate.forwards_before_backward,
        lengths=candidate.sequence_lengths,
        forward_only=forward_only,
        costs=costs,
        messages=messages,
    )
