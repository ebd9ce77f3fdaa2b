"""Solver: the best degrees of parallelism, cuts, schedule and policy of a model on a machine.

Every division of the devices is searched, the one with the least lower bound of its step time
first, until the bound exceeds the fastest simulation; what does not fit is rejected with a reason.
The solver is deterministic: same request, same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from sppo.config.run import RunConfig
from sppo.hardware.description import HardwareSpec
from sppo.planning.search.division import Division, Rejection, divide
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.evaluation import WORTH_IT, with_less_host_memory
from sppo.planning.search.state_choices import runs_by_tiers

RUNNERS_UP = 3


@dataclass(frozen=True, eq=False)
class Solution:
    """Answer of the solver to a request.

    Attributes:
        run: The request.
        hardware: Description of the machine.
        fitting: Best candidates of the divisions that were searched and fit, best first.
        refused: Degrees that cannot work.
        divisions: Divisions of the devices that may work, searched or known to be slower.
    """

    run: RunConfig
    hardware: HardwareSpec
    fitting: tuple[EvaluatedCandidate, ...]
    refused: tuple[Rejection, ...]
    divisions: tuple[Division, ...]

    @property
    def best(self) -> EvaluatedCandidate | None:
        """Recommended candidate; None if nothing fits."""
        return self.fitting[0] if self.fitting else None

    @property
    def runners_up(self) -> tuple[EvaluatedCandidate, ...]:
        """Next best candidates with other degrees, best first."""
        return self.fitting[1 : 1 + RUNNERS_UP]

    @cached_property
    def rejected(self) -> tuple[Rejection, ...]:
        """Degrees that do not fit or cannot work.

        What is slower than the runners-up anyway is only rejected if no placement of activations
        can fit. Shortfalls may be lower bounds; the least is not.
        """
        answered = {one.degrees for one in self.fitting}
        others = [one for one in self.divisions if one.degrees not in answered]
        found = {one: lacks for one in others if (lacks := one.rejection()) is not None}
        while found and not self.fitting:
            nearest = min(found, key=lambda one: found[one].short_bytes)
            exact = nearest.rejection(exact=True)
            if exact is None or found[nearest] == exact:
                break
            found[nearest] = exact
        return (*self.refused, *found.values())

    @property
    def nearest(self) -> Rejection | None:
        """Rejection that lacks least memory; None if none is for memory."""
        return nearest_rejection(self.rejected)

    @cached_property
    def by_num_subsequences(self) -> tuple[EvaluatedCandidate, ...]:
        """Candidates with the best degrees for every N that fits, by N."""
        if self.best is None:
            return ()
        (chosen,) = (one for one in self.divisions if one.degrees == self.best.degrees)
        return chosen.by_num_subsequences(self.best)


def nearest_rejection(rejected: Sequence[Rejection]) -> Rejection | None:
    """Return the rejection that lacks least memory; None if none is for memory."""
    short = [one for one in rejected if one.shortfall is not None]
    return min(short, key=lambda one: one.short_bytes, default=None)


def solve(run: RunConfig, *, hardware: HardwareSpec) -> Solution:
    """Return the best way to train `run` on `hardware`, with runners-up and rejected degrees.

    Raises:
        ValueError: The run asks for something that the machine or the model cannot do.
    """
    found = _search(run, hardware=hardware, count=1 + RUNNERS_UP)
    return replace(found, fitting=_with_less_host_memory(found.fitting))


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
        return _search(run, hardware=hardware, count=1, below=below).best
    except ValueError:
        return None


def _search(run: RunConfig, *, hardware: HardwareSpec, count: int, below: float = inf) -> Solution:
    """Search the fastest divisions of the devices, in the nearest tiers in which any fits.

    Sequence parallelism over several nodes is only tried if nothing fits without it.

    Args:
        run: Validated run configuration.
        hardware: Description of the machine.
        count: Number of divisions to find that fit.
        below: Step time in seconds; surely slower divisions are not searched.
    """
    found = Solution(run, hardware, (), (), ())
    for across_nodes in (False, True):
        inside = found
        for attempt in runs_by_tiers(run, hardware=hardware):
            divisions, refused = divide(attempt, hardware=hardware, across_nodes=across_nodes)
            found = replace(
                inside,
                fitting=_fitting(divisions, count=count, below=below),
                refused=(*inside.refused, *refused),
                divisions=(*inside.divisions, *divisions),
            )
            if found.fitting:
                return found
        if any(one.bound_s > below for one in divisions):
            return found
    return found


def _fitting(
    divisions: Sequence[Division], *, count: int, below: float
) -> tuple[EvaluatedCandidate, ...]:
    """Return the best candidates of the fastest divisions, best first.

    Divisions are searched by the lower bound of their step time, the least first.
    """
    fitting: list[EvaluatedCandidate] = []
    for division in sorted(divisions, key=lambda one: one.plain_s):
        fastest_s = min((one.step_s for one in fitting), default=inf)
        if division.bound_s > (fastest_s if len(fitting) >= count else below):
            continue
        best = division.best(below=fastest_s)
        if best is not None:
            fitting.append(best)
    return tuple(sorted(fitting, key=_rank))


def _with_less_host_memory(
    leaders: Sequence[EvaluatedCandidate],
) -> tuple[EvaluatedCandidate, ...]:
    """Return candidates, best first, with less host memory if that costs up to 1 % of the step.

    The best is, of those that take up to 1 % longer than the fastest, the one that takes the fewest
    bytes of host memory.
    """
    near: list[EvaluatedCandidate] = []
    for leader in leaders:
        if near and (leader.step_s > leaders[0].step_s / WORTH_IT or not near[0].node_host_bytes):
            break
        near.append(with_less_host_memory(leader))
    return *sorted(near, key=lambda one: one.node_host_bytes), *leaders[len(near) :]


def _rank(evaluated: EvaluatedCandidate) -> tuple[float, int, int]:
    """Return a sort key: the step time, then devices and pipeline ranks.

    Sums of equal terms in any order have nine digits in common.
    """
    degrees = evaluated.degrees
    return float(f"{evaluated.step_s:.9g}"), degrees.num_devices, degrees.pipeline_parallel
