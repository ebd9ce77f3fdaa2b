"""Integer program that chooses a level for each diagonal of a pipeline, and its solver.

Let x[d, l] be 1 if diagonal d has level l, otherwise 0. Minimise the sum of cost[d, l] x[d, l],
subject to one level per diagonal, and no window taking more than its room. HiGHS solves the
relaxation, whose levels may be fractional; these are rounded and then improved by exchanges. For
steps of 512 samples on 8 ranks, the result was 0.2 to 0.7 % of a step above the relaxation, which
is a lower bound; branch and bound got as close, in 6 to 13 times the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.optimize import linprog

from sppo.schedule.costs import Table

Levels = npt.NDArray[np.intp]
"""Levels of diagonals or units, by index."""
ROUNDING = 4e-6
"""Share of a window's room by which a solution within HiGHS's tolerance may exceed the room."""
_FULL = 1 - ROUNDING / 2
"""Share of a window's room that may be taken; between the limit given to HiGHS and the room."""
_NEIGHBOURS = 8
"""Number of successive windows of which the fullest, if exceeded, becomes a constraint."""
_NEAREST = 16
"""Most diagonals to exchange with: the nearest that share all exceeded windows."""
_PASSES = 3
"""Most passes of exchanges over all diagonals."""


@dataclass(frozen=True, slots=True, eq=False)
class LevelProgram:
    """Integer program: one level per diagonal, so that no window exceeds its room.

    Attributes:
        cost: Cost of each level of each diagonal, [diagonals, levels].
        used: Room that each level of each diagonal takes, [windows, diagonals * levels].
        room: Room of each window, [windows].
    """

    cost: Table
    used: sparse.csr_array
    room: Table

    def fits(self, levels: Levels) -> bool:
        """Return whether no window exceeds its room with given levels, [diagonals]."""
        return not (self.used @ self._chosen(levels) > self.room).any()

    def added(self, levels: Levels) -> float:
        """Return the total cost of given levels, [diagonals]."""
        return float(self._chosen(levels) @ self.cost.ravel())

    def _chosen(self, levels: Levels) -> Table:
        chosen: Table = np.eye(self.cost.shape[1])[levels].ravel()
        return chosen


def solve(program: LevelProgram, *, below: float = np.inf) -> Levels | None:
    """Return levels of low cost, [diagonals]; None if no choice that fits is found.

    Deterministic and without a time limit, so the result is the same on all ranks.

    Args:
        program: Integer program.
        below: Upper bound of the cost; return None if no choice can cost less.
    """
    cheapest: Levels = program.cost.argmin(axis=1)
    if program.fits(cheapest):
        return cheapest if program.added(cheapest) < below else None
    if (program.room <= 0).any():
        return None
    used = sparse.csr_array(sparse.diags_array(1 / program.room) @ program.used)
    shares = _relaxed(program.cost, used)
    if shares is None or float((shares * program.cost).sum()) >= below:
        return None
    choice = _Choice(program.cost, used, shares)
    for _ in range(_PASSES):
        choice.lower()
        if not choice.exchange():
            break
    return choice.levels if program.fits(choice.levels) else None


def _relaxed(cost: Table, used: sparse.csr_array) -> Table | None:
    """Solve the relaxation: return shares of levels, [diagonals, levels]; None if infeasible.

    Few windows are ever full, so a window becomes a constraint only once a solution exceeds it.
    """
    diagonals, count = cost.shape
    shares: Table = np.eye(count)[cost.argmin(axis=1)]
    heeded = np.zeros(used.shape[0], dtype=bool)
    while True:
        taken = used @ shares.ravel()
        taken[heeded] = 0.0
        blocks = np.pad(taken, (0, -len(taken) % _NEIGHBOURS)).reshape(-1, _NEIGHBOURS)
        fullest = blocks.argmax(axis=1) + _NEIGHBOURS * np.arange(len(blocks))
        broken = fullest[blocks.max(axis=1) > _FULL]
        if not len(broken):
            return shares
        heeded[broken] = True
        found = _shares(cost, used[heeded])
        if found is None:
            return None
        shares = found


def _shares(cost: Table, used: sparse.csr_array) -> Table | None:
    """Solve a relaxation: return shares of levels, [diagonals, levels]; None if infeasible.

    Args:
        cost: Cost of each level of each diagonal, [diagonals, levels].
        used: Share of each window's room that each level takes, [windows, diagonals * levels].
    """
    diagonals, count = cost.shape
    found = linprog(
        cost.ravel() / (cost.max() or 1.0),
        A_ub=used,
        b_ub=np.full(used.shape[0], 1 - ROUNDING),
        A_eq=sparse.kron(sparse.eye_array(diagonals), np.ones((1, count)), format="csr"),
        b_eq=np.ones(diagonals),
        bounds=(0, 1),
    )
    return None if found.x is None else found.x.reshape(diagonals, count)


class _Choice:
    """Level of each diagonal, rounded from shares, and the room left in each window.

    Diagonals are rounded one after another, each to the cheapest level that fits beside the rounded
    levels of earlier diagonals and the shares of later ones. Room that a diagonal does not use is
    available to the next.
    """

    def __init__(self, cost: Table, used: sparse.csr_array, shares: Table) -> None:
        self._cost, count = cost, cost.shape[1]
        self._holds = np.zeros((len(cost), used.shape[0]), dtype=bool)
        self._windows: list[npt.NDArray[np.intp]] = []
        self._taken: list[Table] = []
        by_column = sparse.csc_array(used)
        for diagonal in range(len(cost)):
            own = by_column[:, diagonal * count : (diagonal + 1) * count]
            self._holds[diagonal, own.indices] = True
            windows = np.flatnonzero(self._holds[diagonal])
            taken = np.zeros((len(windows), count))
            level = np.repeat(np.arange(count), np.diff(own.indptr))
            taken[np.searchsorted(windows, own.indices), level] = own.data
            self._windows.append(windows)
            self._taken.append(taken)
        self._left: Table = _FULL - used @ shares.ravel()
        self.levels: Levels = shares.argmax(axis=1)
        for diagonal, windows in enumerate(self._windows):
            taken = self._taken[diagonal]
            left = self._left[windows] + taken @ shares[diagonal]
            by_cost = np.argsort(cost[diagonal], kind="stable").tolist()
            fitting = (level for level in by_cost if (taken[:, level] <= left).all())
            self.levels[diagonal] = level = next(fitting, count - 1)
            self._left[windows] = left - taken[:, level]

    def lower(self) -> None:
        """Give each diagonal the cheapest level for which there is room."""
        for diagonal in self._costliest_first():
            for level in self._cheaper(diagonal):
                if (self._more(diagonal, level) <= self._left[self._windows[diagonal]]).all():
                    self._set(diagonal, level)
                    break

    def exchange(self) -> bool:
        """Lower the cost of diagonals where another diagonal makes room at a smaller cost.

        Returns:
            Whether any exchange was made.
        """
        found = False
        for diagonal in self._costliest_first():
            best = -1e-9 * float(self._cost.max())
            at: tuple[int, int, int] | None = None
            for level in self._cheaper(diagonal):
                gain = self._gain(diagonal, level)
                now = int(self.levels[diagonal])
                self._set(diagonal, level)
                for other, raised, lost in self._makes_room(besides=diagonal):
                    if lost - gain < best:
                        best, at = lost - gain, (level, other, raised)
                self._set(diagonal, now)
            if at is not None:
                self._set(diagonal, at[0])
                self._set(at[1], at[2])
                found = True
        return found

    def _makes_room(self, *, besides: int) -> Iterator[tuple[int, int, float]]:
        """Yield (diagonal, level, extra cost) of other diagonals after which all windows fit.

        Args:
            besides: Diagonal that needs the room, which is left out.
        """
        broken = np.flatnonzero(self._left < 0)
        if not len(broken):  # an earlier exchange made room; the next pass uses it
            return
        others = np.flatnonzero(self._holds[:, broken].all(axis=1))
        nearest = np.argsort(np.abs(others - besides), kind="stable")[1 : 1 + _NEAREST]
        for other in others[nearest].tolist():
            left = self._left[self._windows[other]]
            fits = (self._more(other) <= left[:, None]).all(axis=0)
            for level in np.flatnonzero(fits).tolist():
                yield other, level, -self._gain(other, level)

    def _costliest_first(self) -> list[int]:
        """Return the diagonals by the cost of their levels, most first."""
        added = self._cost[np.arange(len(self.levels)), self.levels]
        order: list[int] = np.argsort(-added, kind="stable").tolist()
        return order

    def _cheaper(self, diagonal: int) -> list[int]:
        """Return the levels that cost less than the level of a diagonal, cheapest first."""
        cost = self._cost[diagonal]
        by_cost = np.argsort(cost, kind="stable").tolist()
        return [level for level in by_cost if cost[level] < cost[self.levels[diagonal]]]

    def _gain(self, diagonal: int, level: int) -> float:
        """Return the cost that another level of a diagonal would save."""
        cost = self._cost[diagonal]
        return float(cost[self.levels[diagonal]] - cost[level])

    def _more(self, diagonal: int, level: int | slice = slice(None)) -> Table:
        """Return the extra room that another level, or each, takes of a diagonal's windows."""
        taken = self._taken[diagonal]
        now = taken[:, self.levels[diagonal]]
        more: Table = taken[:, level] - (now if isinstance(level, int) else now[:, None])
        return more

    def _set(self, diagonal: int, level: int) -> None:
        self._left[self._windows[diagonal]] -= self._more(diagonal, level)
        self.levels[diagonal] = level
