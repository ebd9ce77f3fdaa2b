"""Graph of services whose order is known: its longest paths are the times of all services.

A service occupies a resource for some seconds, as an action or a message does. An edge says that a
service starts when an earlier one has ended, plus a lag. With the order of every resource known,
all waits are such edges, so a service ends as late as the longest path to it, and services on a
cycle never happen, nor do those behind them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
NOWHERE = -1
"""Rank of a service that never happens."""


class Edges(NamedTuple):
    """Edges of a graph, one entry each.

    Attributes:
        earlier: Service that is waited for.
        later: Service that waits.
        lag_s: Seconds from the end of `earlier` to the first possible start of `later`.
        cause: Kind of the wait, a number that the maker of the graph chooses.
    """

    earlier: Ints
    later: Ints
    lag_s: Floats
    cause: Ints

    @classmethod
    def of(
        cls, earlier: Ints, later: Ints, *, lag_s: Floats | float = 0.0, cause: int = 0
    ) -> Edges:
        """Return edges that all have the same cause, and one lag or one lag each."""
        lags = np.broadcast_to(np.asarray(lag_s, dtype=np.float64), later.shape)
        return cls(earlier, later, lags, np.full(later.shape, cause))

    @classmethod
    def joined(cls, parts: Sequence[Edges]) -> Edges:
        """Return the edges of all parts."""
        return cls(*map(np.concatenate, zip(*parts, strict=True)))

    def where(self, chosen: Flags | Ints) -> Edges:
        """Return the edges that flags choose, or those at some places."""
        return Edges(
            self.earlier[chosen], self.later[chosen], self.lag_s[chosen], self.cause[chosen]
        )

    def starts_s(self, ends_s: Floats) -> Floats:
        """Return when each service may start as far as these edges tell, from the ends of all."""
        starts = np.zeros(ends_s.shape)
        np.maximum.at(starts, self.later, ends_s[self.earlier] + self.lag_s)
        return starts


def in_turn(services: Ints, *, resources: Ints, turns: Ints) -> tuple[Ints, Ints]:
    """Return (earlier, later): each resource serves in the order of the turns, one at a time."""
    order = np.argsort(resources * (1 + turns.max(initial=0)) + turns, kind="stable")
    follows = np.diff(resources[order]) == 0
    return services[order][:-1][follows], services[order][1:][follows]


def longest_paths(edges: Edges, *, seconds: Floats, ranks: Ints, turns: Ints) -> Floats:
    """Return when each service ends; infinity for services that never happen.

    The services of a rank are walked in turn, until one waits for a service of another rank that
    has no time yet.

    Args:
        edges: What each service waits for.
        seconds: Seconds of each service.
        ranks: Rank of each service, or `NOWHERE`.
        turns: Order of the services of a rank, in which no service waits for a later one.
    """
    order = np.lexsort((turns, ranks))
    steps = _steps(edges, seconds=seconds, order=order)
    ends = [0.0] + [math.inf] * (steps.seconds.size - 1)
    own = np.repeat(ranks[order], np.diff(steps.last[order], prepend=0))
    bounds = 1 + np.searchsorted(own, np.arange(ranks.max(initial=NOWHERE) + 2))
    walks = [_walk(ends, steps, first, stop) for first, stop in pairwise(bounds.tolist())]
    waiting = dict.fromkeys(range(len(walks)), 0)
    goes_on = True
    while goes_on:
        goes_on = False
        for rank, awaited in [*waiting.items()]:
            if ends[awaited] < math.inf:
                goes_on = True
                step = next(walks[rank], None)
                if step is None:
                    del waiting[rank]
                else:
                    waiting[rank] = step
    return np.array(ends)[steps.last]


class _Steps(NamedTuple):
    """Services cut into steps, each of which waits for two earlier steps, and ends as late as both.

    Step 0 ends at time 0, and the last step of a service ends as the service does.
    """

    one: Ints
    one_lag_s: Floats
    other: Ints
    other_lag_s: Floats
    seconds: Floats
    last: Ints
    """Last step of each service."""


def _steps(edges: Edges, *, seconds: Floats, order: Ints) -> _Steps:
    """Return the steps of all services, of which there are fewer than edges.

    Args:
        edges: What each service waits for.
        seconds: Seconds of each service.
        order: Services in the order of their steps.
    """
    waits = np.bincount(edges.later, minlength=order.size)
    counts = np.maximum(1, waits - 1)
    last = np.empty_like(order)
    last[order] = np.cumsum(counts[order])
    earlier, later, lag_s, _ = edges.where(np.argsort(edges.later, kind="stable"))
    number = np.arange(later.size) - (np.cumsum(waits) - waits)[later]
    count = 1 + int(counts.sum())
    # The first edge of a service is the one of its first step, all others are each step's other.
    sources, lags = np.zeros((2, count), dtype=np.int64), np.zeros((2, count))
    sources[0] = np.arange(-1, count - 1)
    first = 1 + last - counts
    sources[0, first] = 0
    is_other = (number > 0).astype(np.int64)
    at = first[later] + np.maximum(0, number - 1)
    sources[is_other, at], lags[is_other, at] = last[earlier], lag_s
    takes = np.zeros(count)
    takes[last] = seconds
    return _Steps(sources[0], lags[0], sources[1], lags[1], takes, last)


def _walk(ends: list[float], steps: _Steps, first: int, stop: int) -> Iterator[int]:
    """Set the ends of the steps of one rank, and yield the step that must end before the walk."""
    columns = (column[first:stop].data for column in steps[:5])
    walk = zip(range(first, stop), *columns, strict=True)
    for step, one, one_lag, other, other_lag, seconds in walk:
        start, possible = ends[one] + one_lag, ends[other] + other_lag
        if possible > start:
            start = possible
        while start == math.inf:
            yield other if ends[one] < math.inf else one
            start = max(ends[one] + one_lag, ends[other] + other_lag)
        ends[step] = start + seconds
