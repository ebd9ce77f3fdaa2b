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
    divisions, refused, leaders = _leaders(run, hardware=hardware, count=1 + RUNNERS_UP)
    fitting, lacking = _executed(leaders)
    leading = [leader.degrees for leader in leaders]
    rejected = (
        *refused,
        *(
            division.rejection(exact=not fitting)
            for division in divisions
            if division.degrees not in leading and not division.fits
        ),
        *map(rejection_of, lacking),
    )
    if not fitting:
        return Solution(run, hardware, None, (), (), rejected)
    best, *others = *fitting, *leaders[len(fitting) + len(lacking) :]
    (chosen,) = (division for division in divisions if division.degrees == best.degrees)
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
    divisions, _, leaders = _leaders(run, hardware=hardware, count=1 + RUNNERS_UP)
    fitting, lacking = _executed(leaders)
    if fitting:
        return fitting[0]
    leading = [leader.degrees for leader in leaders]
    others = (one.rejection(exact=True) for one in divisions if one.degrees not in leading)
    return nearest_rejection((*others, *map(rejection_of, lacking)))


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
        _, _, leaders = _leaders(run, hardware=hardware, count=1, below=below)
    except ValueError:
        return None
    return leaders[0] if leaders else None


def _leaders(
    run: RunConfig, *, hardware: HardwareSpec, count: int, below: float = inf
) -> tuple[list[Division], list[Rejection], list[EvaluatedCandidate]]:
    """Find the best candidates of the fastest divisions, in the nearest tiers in which any fits.

    Returns:
        The divisions of the devices that can work, the rejections of those that cannot, and the
        best candidates of at least `count` divisions if as many fit, fastest first.
    """
    for attempt in runs_by_tiers(run, hardware=hardware):
        divisions, refused = divide(attempt, hardware=hardware)
        leaders: list[EvaluatedCandidate] = []
        for division in sorted(divisions, key=lambda one: one.plain_s):
            fastest_s = min((leader.step_s for leader in leaders), default=inf)
            if division.bound_s > (fastest_s if len(leaders) >= count else below):
                continue
            best = division.best(below=fastest_s)
            if best.shortfall is None:
                leaders.append(best)
        if leaders:
            break
    return divisions, refused, sorted(leaders, key=_rank)


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
