"""Solver: the best degrees of parallelism, cuts, schedule and policy of a model on a machine.

Every division of the devices is tried with every number of subsequences worth trying, priced in
closed form, and rejected with a reason if it does not fit. The best few are simulated, and the
simulation decides between them. The solver is deterministic: same request, same answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sppo.config.run import RunConfig
from sppo.hardware.description import HardwareSpec
from sppo.planning.search.best_schedule import scheduled
from sppo.planning.search.candidate_search import (
    WORTH_IT,
    CandidateSearch,
    Rejection,
    rejection_of,
)
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.feasibility import fits_at_all
from sppo.planning.search.ranking import rank_of
from sppo.planning.search.simulated_candidate import simulate_candidate
from sppo.planning.search.state_choices import runs_by_tiers

RUNNERS_UP = 3
_SIMULATED = 1 + RUNNERS_UP


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """Answer of the solver to a request.

    Attributes:
        run: The request.
        hardware: Description of the machine.
        best: Recommended candidate; None if nothing fits.
        runners_up: Next best candidates with other degrees, best first.
        by_num_subsequences: Candidates with the best degrees for every N that fits, by N.
        rejected: Degrees that do not fit or cannot work.
    """

    run: RunConfig
    hardware: HardwareSpec
    best: EvaluatedCandidate | None
    runners_up: tuple[EvaluatedCandidate, ...]
    by_num_subsequences: tuple[EvaluatedCandidate, ...]
    rejected: tuple[Rejection, ...]


def solve(run: RunConfig, *, hardware: HardwareSpec) -> Solution:
    """Return the best way to train `run` on `hardware`, with runners-up and rejected degrees.

    Raises:
        ValueError: The run asks for something that the machine or the model cannot do.
    """
    decided, search, leaders = _leaders(run, hardware=hardware)
    fitting, lacking = _scheduled(decided, leaders)
    rejected = (*search.rejections(exact=not fitting), *map(rejection_of, lacking))
    if not fitting:
        return Solution(run, hardware, None, (), (), rejected)
    best, *others = *fitting, *leaders[len(fitting) + len(lacking) :]
    (leader,) = (one for one in leaders if one.degrees == best.degrees)
    return Solution(
        run,
        hardware,
        best=best,
        runners_up=tuple(others[:RUNNERS_UP]),
        by_num_subsequences=search.by_num_subsequences(
            leader.degrees, virtual_stages=leader.candidate.virtual_stages
        ),
        rejected=rejected,
    )


def recommend(run: RunConfig, *, hardware: HardwareSpec) -> EvaluatedCandidate | Rejection | None:
    """Return the candidate that `solve` recommends, without alternatives.

    If nothing fits, return the rejection that lacks least memory; None if memory is never the
    reason.

    Raises:
        ValueError: The run asks for something that the machine or the model cannot do.
    """
    decided, search, leaders = _leaders(run, hardware=hardware)
    fitting, lacking = _scheduled(decided, leaders)
    if fitting:
        return fitting[0]
    return nearest_rejection((*search.rejections(exact=True), *map(rejection_of, lacking)))


def _scheduled(
    run: RunConfig, leaders: Sequence[EvaluatedCandidate]
) -> tuple[list[EvaluatedCandidate], list[EvaluatedCandidate]]:
    """Return the best of several candidates under the programs that are executed.

    The best is, of those that take up to 1 % longer than the fastest, the one that takes the fewest
    bytes of host memory. Candidates whose own schedule takes more than 1 % longer are not tried.

    Args:
        run: Run with all tiers decided.
        leaders: Simulated candidates, fastest first.

    Returns:
        Candidates that fit, the best first, with their fastest schedules: all that may be the best;
        and the candidates that do not fit, with what they lack.
    """
    fitting: list[EvaluatedCandidate] = []
    lacking: list[EvaluatedCandidate] = []
    most_s = float("inf")
    for leader in leaders:
        if fitting and (leader.step_s > most_s or not fitting[0].node_host_bytes):
            break
        found = scheduled(run, leader)
        if found.shortfall is not None:
            lacking.append(found)
            continue
        most_s = min(most_s, min(leader.step_s, found.step_s) / WORTH_IT)
        fitting.append(found)
    return sorted(fitting, key=lambda one: _host_bytes(one, most_s=most_s)), lacking


def _host_bytes(evaluated: EvaluatedCandidate, *, most_s: float) -> float:
    """Return the host memory of a node; infinite for steps longer than `most_s`."""
    return evaluated.node_host_bytes if evaluated.step_s <= most_s else float("inf")


def _leaders(
    run: RunConfig, *, hardware: HardwareSpec
) -> tuple[RunConfig, CandidateSearch, list[EvaluatedCandidate]]:
    """Find the fastest candidates, with the training state in the nearest tiers that fit.

    Returns:
        The run with all tiers decided, its search, and its simulated candidates, fastest first.
    """
    attempts = runs_by_tiers(run, hardware=hardware)
    for place, attempt in enumerate(attempts):
        search = CandidateSearch(attempt, hardware=hardware)
        leaders = _simulated(search.fastest_first())
        if leaders:
            return attempt, search, _refined(leaders, search)
        if place == 0 and not any(fits_at_all(other, hardware) for other in attempts[1:]):
            break
    if len(attempts) > 1:
        search = CandidateSearch(attempts[-1], hardware=hardware)
    return attempts[-1], search, []


def _refined(
    leaders: list[EvaluatedCandidate], search: CandidateSearch
) -> list[EvaluatedCandidate]:
    """Return candidates with the number of subsequences that simulates fastest; fastest first.

    Candidates after the first are refined only if that may make them faster than the best so far.
    """
    best = simulate_candidate(search.refined(leaders[0]))
    found = [best]
    for leader in leaders[1:_SIMULATED]:
        refined = simulate_candidate(search.refined(leader, below=best.step_s))
        found.append(min(leader, refined, key=rank_of))
        best = min(best, refined, key=rank_of)
    return sorted([*found, *leaders[_SIMULATED:]], key=rank_of)


def nearest_rejection(rejected: Sequence[Rejection]) -> Rejection | None:
    """Return the rejection that lacks least memory; None if none is for memory."""
    short = [rejection for rejection in rejected if rejection.shortfall is not None]
    return min(short, key=_short_bytes, default=None)


def _short_bytes(rejection: Rejection) -> int:
    assert rejection.shortfall is not None, "only asked of what lacks memory"
    return rejection.shortfall.short_bytes


def _simulated(fastest_first: Iterator[EvaluatedCandidate]) -> list[EvaluatedCandidate]:
    """Simulate the first few candidates and all others that might be faster; fastest first.

    The closed form may exceed the simulation by a few percent (waits for copies, deferred weight
    gradients, MSP). Beyond the first few, candidates stop at the first whose closed form exceeds
    the fastest simulation.
    """
    simulated: list[EvaluatedCandidate] = []
    fastest_s = float("inf")
    for place, evaluated in enumerate(fastest_first):
        if place >= _SIMULATED and evaluated.step_s >= fastest_s:
            break
        simulated.append(simulate_candidate(evaluated))
        fastest_s = min(fastest_s, simulated[-1].step_s)
    return sorted(simulated, key=rank_of)
