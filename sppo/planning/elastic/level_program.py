"""The integer program that chooses a level for each diagonal of a pipeline, and its solution.

With x[d, l] whether diagonal d has level l: minimise the sum of cost[d, l] x[d, l], where each
diagonal has one level, and no window takes more than there is. HiGHS solves it by branch and bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint

from sppo.planning.elastic.silent_milp import milp
from sppo.schedule.costs import Table

Levels = npt.NDArray[np.intp]
"""Which level each diagonal or unit has."""
GAP = 1e-3
"""Cost above the least possible, over what it adds to and itself, at which a choice is taken."""
_NODES = 10
"""Nodes of the search tree: a limit that, unlike one of time, is the same on all ranks."""
_NEAR = 0.9
"""Share of its room from which a window of the relaxed solution is among those solved for first."""
ROUNDING = 4e-6
"""Share of a window by which a solution within HiGHS's tolerance may exceed it."""


@dataclass(frozen=True, slots=True, eq=False)
class LevelProgram:
    """One level for each diagonal, so that every window fits.

    Attributes:
        cost: What a level on a diagonal adds, [diagonals, levels].
        used: What it takes of each window, [windows, diagonals * levels].
        room: What there is in each window, [windows].
        base: What the costs are added to, for the gap.
    """

    cost: Table
    used: sparse.csr_array
    room: Table
    base: float = 0.0

    def fits(self, levels: Levels) -> bool:
        """Whether a choice of levels, [diagonals], breaks no window."""
        return not self.broken(levels).any()

    def broken(self, levels: Levels) -> npt.NDArray[np.bool_]:
        """Return which windows a choice of levels, [diagonals], breaks, [windows]."""
        taken: npt.NDArray[np.bool_] = self.used @ self._chosen(levels) > self.room
        return taken

    def added(self, levels: Levels) -> float:
        """Return what a choice of levels, [diagonals], adds."""
        return float(self._chosen(levels) @ self.cost.ravel())

    def _chosen(self, levels: Levels) -> Table:
        chosen: Table = np.eye(self.cost.shape[1])[levels].ravel()
        return chosen


def solve(program: LevelProgram, *, gap: float = GAP) -> Levels | None:
    """Return the levels that add least, [diagonals]; None where no choice that fits is found.

    Windows with room to spare are left out of the search: it is made for those that the relaxed
    program, whose levels may be fractions, fills, and again with any that its solution breaks. The
    same on all ranks: the search ends by its gap or after so many nodes, not by time.

    Args:
        program: what to solve.
        gap: above the least, over the base and it, at which a choice is taken.
    """
    cheapest: Levels = program.cost.argmin(axis=1)
    if program.fits(cheapest):
        return cheapest
    if (program.room <= 0).any():
        return None
    used = sparse.csr_array(sparse.diags_array(1 / program.room) @ program.used)
    relaxed = _shares(program, used, options={}, integral=False)
    if relaxed is None:
        return None
    searched = used @ relaxed.ravel() >= _NEAR
    options = {"mip_rel_gap": gap, "node_limit": _NODES if gap else _NODES**4}
    while True:
        shares = _shares(program, used[searched], options=options, integral=True)
        if shares is None:
            return None
        levels: Levels = shares.argmax(axis=1)
        broken = program.broken(levels)
        if not broken.any():
            return levels
        if searched[broken].all():
            return None
        searched |= broken


def _shares(
    program: LevelProgram, used: sparse.csr_array, *, options: dict[str, float], integral: bool
) -> Table | None:
    """Return the share that each level has of each diagonal, [diagonals, levels]; None: no choice.

    Args:
        program: what to solve.
        used: of the windows that are heeded, over their room, [windows, diagonals * levels].
        options: of HiGHS.
        integral: whether every share is 0 or 1.
    """
    diagonals, count = program.cost.shape
    # The last variable is 1 and costs the base, so that the gap is over that, too.
    one_each = sparse.kron(sparse.eye_array(diagonals), np.ones((1, count)))
    columns = [sparse.csr_array((rows.shape[0], 1)) for rows in (one_each, used)]
    found = milp(
        np.append(program.cost.ravel(), program.base) / (program.cost.max() or 1.0),
        integrality=np.append(np.full(program.cost.size, int(integral)), 0),
        bounds=Bounds(np.append(np.zeros(program.cost.size), 1.0), 1.0),
        constraints=[
            LinearConstraint(sparse.hstack([one_each, columns[0]]), 1, 1),
            LinearConstraint(sparse.hstack([used, columns[1]]), -np.inf, 1 - ROUNDING),
        ],
        options=options,
    )
    return None if found.x is None else found.x[:-1].reshape(diagonals, count)
