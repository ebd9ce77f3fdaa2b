"""A candidate that fits, and its simulation."""

from __future__ import annotations

from dataclasses import dataclass

from sppo.cost.candidate import Candidate
from sppo.planning.candidate import EvaluatedCandidate
from sppo.planning.choices import Degrees
from sppo.schedule.generators import generate
from sppo.schedule.prepare import lower
from sppo.schedule.simulate import simulate
from sppo.schedule.timeline import Timeline

_CLOSED_FORM = ("sppo", "seq1f1b", "1f1b")
"""Schedules that `sppo.cost.step_time` is about."""


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
        """Seconds of a step: simulated where that was done, else in closed form.

        A simulated copy may lag behind compute without limit, a real one waits for room, so what
        the closed form waits for counts in both.
        """
        time = self.assessment.time
        if self.timeline is None:
            return time.step_s
        played = self.timeline.makespan_s
        if self.candidate.schedule in _CLOSED_FORM:
            return max(played, time.step_s)
        return played + time.exposed_copy_s

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
    candidate, costs = assessment.candidate, assessment.costs
    schedule = generate(
        candidate.schedule,
        num_ranks=candidate.pipeline_parallel_degree,
        lengths=(candidate.lengths,) * candidate.sequences,
        costs=costs,
    )
    return Option(assessment, simulate(lower(schedule, costs=costs), costs=costs))
