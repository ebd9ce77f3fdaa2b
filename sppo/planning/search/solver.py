"""The best way to run a model on a machine: degrees of parallelism, cuts, schedule, policy.

Every way to divide the devices is tried with every number of subsequences worth trying, priced
in closed form, and dropped with the reason where it does not fit. The best few are simulated; the
simulation decides between them. Everything is deterministic: same request, same answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sppo.config.run import RunConfig
from sppo.hardware.description import HardwareSpec
from sppo.planning.search.best_schedule import with_best_schedule
from sppo.planning.search.candidate_search import CandidateSearch, Rejection, rank_of
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.feasibility import fits_at_all
from sppo.planning.search.simulated_candidate import simulate_candidate
from sppo.planning.search.state_choices import runs_by_tiers

RUNNERS_UP = 3
_SIMULATED = 1 + RUNNERS_UP


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """The answer to a request.

    Attributes:
        run: The request.
        hardware: The machine.
        best: The recommended way; None where nothing fits.
        runners_up: The next best with other degrees, best first.
        by_num_subsequences: The best way's degrees with every N worth trying, by N.
        rejected: What does not fit or cannot work.
    """

    run: RunConfig
    hardware: HardwareSpec
    best: EvaluatedCandidate | None
    runners_up: tuple[EvaluatedCandidate, ...]
    by_num_subsequences: tuple[EvaluatedCandidate, ...]
    rejected: tuple[Rejection, ...]


def solve(run: RunConfig, *, hardware: HardwareSpec) -> Solution:
    """The best way to train `run` on `hardware`, with the reasons for the rest.

    Raises:
        ValueError: the run asks for what the machine or the model cannot do.
    """
    decided, search, leaders = _leaders(run, hardware=hardware)
    if not leaders:
        return Solution(run, hardware, None, (), (), search.rejections())
    return Solution(
        run,
        hardware,
        best=with_best_schedule(decided, leaders[0]),
        runners_up=tuple(leaders[1 : 1 + RUNNERS_UP]),
        by_num_subsequences=search.by_num_subsequences(
            leaders[0].degrees, virtual_stages=leaders[0].candidate.virtual_stages
        ),
        rejected=search.rejections(),
    )


def recommend(run: RunConfig, *, hardware: HardwareSpec) -> EvaluatedCandidate | Rejection | None:
    """The best way that `solve` finds, alone; the one short of least memory where nothing fits.

    Raises:
        ValueError: the run asks for what the machine or the model cannot do.
    """
    decided, search, leaders = _leaders(run, hardware=hardware)
    if leaders:
        return with_best_schedule(decided, leaders[0])
    return nearest_rejection(search.rejections())


def _leaders(
    run: RunConfig, *, hardware: HardwareSpec
) -> tuple[RunConfig, CandidateSearch, list[EvaluatedCandidate]]:
    """The fastest candidates with the training state as near to the devices as it fits.

    Returns:
        the run with the place of its state decided, its search, and what is simulated of it.
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
    """Return leaders with the number of subsequences that simulates fastest; the fastest first.

    Of those behind the first one only where they may be faster than it.
    """
    best = simulate_candidate(search.refined(leaders[0]))
    found = [best]
    for leader in leaders[1:_SIMULATED]:
        refined = simulate_candidate(search.refined(leader, below=best.step_s))
        found.append(min(leader, refined, key=rank_of))
        best = min(best, refined, key=rank_of)
    return sorted([*found, *leaders[_SIMULATED:]], key=rank_of)


def nearest_rejection(rejected: Sequence[Rejection]) -> Rejection | None:
    """Return what lacks least memory; None where nothing was refused for memory."""
    short = [rejection for rejection in rejected if rejection.shortfall is not None]
    return min(short, key=_short_bytes, default=None)


def _short_bytes(rejection: Rejection) -> int:
    assert rejection.shortfall is not None, "only asked of what lacks memory"
    return rejection.shortfall.short_bytes


def _simulated(fastest_first: Iterator[EvaluatedCandidate]) -> list[EvaluatedCandidate]:
    """Simulate the first few candidates and all that might be faster still; the fastest first.

    Where the closed form is above the simulation (copies that are waited for, weight halves that
    are put off, MSP) that is by a few percent, and only the first few are simulated.
    """
    played: list[EvaluatedCandidate] = []
    fastest_s = float("inf")
    for place, evaluated in enumerate(fastest_first):
        if place >= _SIMULATED and evaluated.step_s >= fastest_s:
            break
        played.append(simulate_candidate(evaluated))
        fastest_s = min(fastest_s, played[-1].step_s)
    return sorted(played, key=rank_of)
