"""Solver: the best degrees of parallelism, cuts, schedule and policy of a model on a machine.

Every division of the devices is searched, the one with the least lower bound of its step time
first, until the bound exceeds the fastest simulation; what does not fit is rejected with a reason.
The solver is deterministic: same request, same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from sppo.config.run import RunConfig
from sppo.hardware.description import HardwareSpec
from sppo.planning.search.division import WORTH_IT, Division, Rejection, divide, rejection_of
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.executed_candidate import as_executed
from sppo.planning.search.state_choices import runs_by_tiers

RUNNERS_UP = 3


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """Answer of the solver to a request.

    Attributes:
        run: The request.
        hardware: Description of the machine.
        best: Recommended candidate; None if nothing fits.
        runners_up: Next best candidates with other degrees, best first.
        by_num_subsequences: Candidates with the best degrees for every N that fits, by N.
        rejected: Degrees that do not fit or cannot work. What is slower than the runners-up anyway
            is only rejected if no placement of activations can fit.
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
    found = _search(run, hardware=hardware, count=1 + RUNNERS_UP)
    fitting, lacking = _executed(found.leaders)
    slower = (division.least_rejection() for division in found.slower)
    rejected = (
        *found.rejected,
        *(rejection for rejection in slower if rejection is not None),
        *map(rejection_of, lacking),
    )
    if not fitting:
        return Solution(run, hardware, None, (), (), rejected)
    best, *others = *fitting, *found.leaders[len(fitting) + len(lacking) :]
    (chosen,) = (division for division in found.searched if division.degrees == best.degrees)
    return Solution(
        run,
        hardware,
        best=best,
        runners_up=tuple(others[:RUNNERS_UP]),
        by_num_subsequences=chosen.by_num_subsequences(best),
        rejected=rejected,
    )


def recommend(run: RunConfig, *, hardware: HardwareSpec) -> EvaluatedCandidate | Rejection | None:
    """Return the candidate that `solve` recommends, without alternatives.

    If nothing fits, return the rejection that lacks least memory; None if memory is never the
    reason.

    Raises:
        ValueError: The run asks for something that the machine or the model cannot do.
    """
    found = _search(run, hardware=hardware, count=1 + RUNNERS_UP)
    fitting, lacking = _executed(found.leaders)
    if fitting:
        return fitting[0]
    return nearest_rejection((*found.rejected, *map(rejection_of, lacking)))


def quick_best(
    run: RunConfig, hardware: HardwareSpec, *, below: float = inf
) -> EvaluatedCandidate | None:
    """Return the fastest candidate, whatever host memory it takes; None if none fits.

    Also None for requests that cannot work at all, such as more subsequences than tokens: callers
    vary requests and try many that cannot.

    Args:
        run: Validated run configuration.
        hardware: Description of the machine.
        below: Step time in seconds; None, too, if every candidate surely takes longer.
    """
    try:
        leaders = _search(run, hardware=hardware, count=1, below=below).leaders
    except ValueError:
        return None
    return leaders[0] if leaders else None


@dataclass(frozen=True, slots=True)
class _Search:
    """Result of a search over the divisions of a machine.

    Attributes:
        leaders: Best candidates of the divisions of the devices that were searched and fit,
            fastest first.
        searched: Divisions that were searched.
        slower: Divisions that were not, because they are slower than the leaders.
        rejected: Degrees that cannot work, and those that were searched and do not fit.
    """

    leaders: list[EvaluatedCandidate]
    searched: list[Division]
    slower: list[Division]
    rejected: list[Rejection]


def _search(run: RunConfig, *, hardware: HardwareSpec, count: int, below: float = inf) -> _Search:
    """Search the fastest divisions of the devices, in the nearest tiers in which any fits.

    Sequence parallelism over several nodes is only tried if nothing fits without it.

    Args:
        run: Validated run configuration.
        hardware: Description of the machine.
        count: Number of divisions to find that fit.
        below: Step time in seconds; surely slower divisions are not searched.
    """
    inside: list[Rejection] = []
    for across_nodes in (False, True):
        for attempt in runs_by_tiers(run, hardware=hardware):
            divisions, refused = divide(attempt, hardware=hardware, across_nodes=across_nodes)
            found = _search_divisions(divisions, count=count, below=below)
            found.rejected[:0] = [*inside, *refused]
            if found.leaders:
                return found
        if found.slower:
            return found
        inside = found.rejected
    return found


def _search_divisions(divisions: Sequence[Division], *, count: int, below: float) -> _Search:
    """Search the fastest of some divisions, those with the least lower bound first."""
    found = _Search([], [], [], [])
    for division in sorted(divisions, key=lambda one: one.plain_s):
        fastest_s = min((leader.step_s for leader in found.leaders), default=inf)
        if division.bound_s > (fastest_s if len(found.leaders) >= count else below):
            found.slower.append(division)
            continue
        found.searched.append(division)
        best = division.best(below=fastest_s)
        if best.shortfall is None:
            found.leaders.append(best)
        else:
            found.rejected.append(rejection_of(best))
    found.leaders.sort(key=_rank)
    return found


def _executed(
    leaders: Sequence[EvaluatedCandidate],
) -> tuple[list[EvaluatedCandidate], list[EvaluatedCandidate]]:
    """Return the best of several candidates as they are executed.

    The best is, of those that take up to 1 % longer than the fastest, the one that takes the fewest
    bytes of host memory.

    Args:
        leaders: Simulated candidates, fastest first.

    Returns:
        Candidates that fit, the best first: all that may be the best; and the candidates that do
        not fit, with what they lack.
    """
    fitting: list[EvaluatedCandidate] = []
    lacking: list[EvaluatedCandidate] = []
    most_s = inf
    for leader in leaders:
        if fitting and (leader.step_s > most_s or not fitting[0].node_host_bytes):
            break
        found = as_executed(leader)
        if found.shortfall is not None:
            lacking.append(found)
            continue
        most_s = min(most_s, leader.step_s / WORTH_IT)
        fitting.append(found)
    return sorted(fitting, key=lambda one: one.node_host_bytes), lacking


def nearest_rejection(rejected: Sequence[Rejection]) -> Rejection | None:
    """Return the rejection that lacks least memory; None if none is for memory."""
    short = [rejection for rejection in rejected if rejection.shortfall is not None]
    return min(short, key=_short_bytes, default=None)


def _short_bytes(rejection: Rejection) -> int:
    assert rejection.shortfall is not None, "only asked of what lacks memory"
    return rejection.shortfall.short_bytes


def _rank(evaluated: EvaluatedCandidate) -> tuple[float, int, int]:
    """Return a sort key: the step time, then devices and pipeline ranks.

    Sums of equal terms in any order have nine digits in common.
    """
    degrees = evaluated.degrees
    return float(f"{evaluated.step_s:.9g}"), degrees.num_devices, degrees.pipeline_parallel
