"""A candidate that fits, and its simulation."""

from __future__ import annotations

from dataclasses import dataclass

from sppo.cost.candidate import Candidate
from sppo.planning.candidate import EvaluatedCandidate
from sppo.planning.choices import Degrees
from sppo.schedule.actions import Schedule
from sppo.schedule.costs import Costs
from sppo.schedule.program import step_program
from sppo.schedule.simulate import simulate
from sppo.schedule.timeline import Timeline


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """A candidate that fits, with its step as predicted.

    Attributes:
        assessment: Its price and memory.
        timeline: Its simulation; None where only the closed form was computed.
    """

    assessment: EvaluatedCandidate
    timeline: Timeline | None = None

    @property
    def step_s(self) -> float:
        """Seconds of a step: simulated where that was done, else in closed form."""
        return self.assessment.time.step_s if self.timeline is None else self.timeline.makespan_s

    @property
    def candidate(self) -> Candidate:
        """What would be run."""
        return self.assessment.candidate

    @property
    def degrees(self) -> Degrees:
        """How the devices are shared out."""
        candidate = self.candidate
        return Degrees(
            candidate.data_parallel_degree,
            candidate.pipeline_parallel_degree,
            candidate.workload.sequence_parallel_degree,
        )


def simulate_option(assessment: EvaluatedCandidate) -> Option:
    """The option with its simulated step."""
    program = candidate_program(assessment.candidate, costs=assessment.costs)
    return Option(assessment, simulate(program, costs=assessment.costs))


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
