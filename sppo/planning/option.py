"""A candidate that fits, simulated; and the schedule that makes it fastest."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sppo.config.run import RunConfig
from sppo.planning.candidate import Assessment, Candidate, assess
from sppo.planning.choices import Degrees
from sppo.schedule.generators import generate
from sppo.schedule.prepare import lower
from sppo.schedule.simulate import simulate
from sppo.schedule.timeline import Timeline

_SCHEDULED_UNITS = 1200
"""Stages x units up to which other schedules are tried: making and playing them takes a second."""
_WORTH_IT = 0.99
"""Another schedule is taken if it leaves at most this share of the step: predictions are not so
exact that less would count, and the plain program is the simplest to run."""
_CLOSED_FORM = ("sppo", "seq1f1b", "1f1b")
"""Schedules that `sppo.planning.step_time` is about."""


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """A candidate that fits, with its step as predicted.

    Attributes:
        assessment: Its price and memory.
        timeline: Its simulation; None where only the closed form was computed.
    """

    assessment: Assessment
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


def simulate_option(assessment: Assessment) -> Option:
    """The option with its simulated step."""
    candidate, costs = assessment.candidate, assessment.costs
    schedule = generate(
        candidate.schedule,
        num_ranks=candidate.pipeline_parallel_degree,
        lengths=candidate.request.lengths,
        costs=costs,
    )
    return Option(assessment, simulate(lower(schedule, costs=costs), costs=costs))


def with_best_schedule(run: RunConfig, best: Option) -> Option:
    """`best` with the schedule that makes it fastest, where the run leaves the choice.

    Tried are the zero-bubble program and multiplexed sequence partitioning (MSP), each with the
    memory it needs. MSP is taken however little it gains where the run asks for it.
    """
    candidate = best.candidate
    size = best.assessment.costs.forward_s.size
    if run.parallel.schedule != "auto" or candidate.pipeline_parallel_degree == 1:
        return best
    forced = run.parallel.multiplexed == "on"
    if size > _SCHEDULED_UNITS and not forced:
        return best
    if best.timeline is None:
        best = simulate_option(best.assessment)
    if forced:
        return _scheduled(candidate, "sppo_msp") or best
    names = ["seq_zb_h1"] + (["sppo_msp"] if run.parallel.multiplexed == "auto" else [])
    for name in names:
        other = _scheduled(candidate, name)
        if other is not None and other.step_s <= best.step_s * _WORTH_IT:
            best = other
    return best


def _scheduled(candidate: Candidate, name: str) -> Option | None:
    """The candidate under another schedule, None where it does not fit."""
    assessment = assess(replace(candidate, schedule=name))
    return simulate_option(assessment) if assessment.shortfall is None else None
