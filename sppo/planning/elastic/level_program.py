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
GAP = 2e-3
"""Cost above the least possible, over it, at which a choice is taken."""
_NODES = 200
"""Nodes of the search tree: a limit that, unlike one of time, is the same on all ranks."""
ROUNDING = 4e-6
"""Share of a window by which a solution within HiGHS's tolerance may exceed it."""


@dataclass(frozen=True, slots=True, eq=False)
class LevelProgram:
    """One level for each diagonal, so that every window fits.

    Attributes:
        cost: What a level on a diagonal adds, [diagonals, levels].
        used: What it takes of each window, [windows, diagonals * levels].
        room: What there is in each window, [windows].
    """

    cost: Table
    used: sparse.csr_array
    room: Table

    def fits(self, levels: Levels) -> bool:
        """Whether a choice of levels, [diagonals], breaks no window."""
        return bool((self.used @ self._chosen(levels) <= self.room).all())

    def added(self, levels: Levels) -> float:
        """Return what a choice of levels, [diagonals], adds."""
        return float(self._chosen(levels) @ self.cost.ravel())

    def _chosen(self, levels: Levels) -> Table:
        chosen: Table = np.eye(self.cost.shape[1])[levels].ravel()
        return chosen


def solve(program: LevelProgram, *, gap: float = GAP) -> Levels | None:
    """Return the levels that add least, [diagonals]; None where no choice fits.

    The same on all ranks: the search ends by its gap or after so many nodes, not by time.

    Args:
        program: what to solve.
        gap: above the least, over it, at which a choice is taken.
    """
    cheapest: Levels = program.cost.argmin(axis=1)
    if program.fits(cheapest):
        return cheapest
    if (program.room <= 0).any():
        return None
    diagonals, count = program.cost.shape
    one_each = sparse.kron(sparse.eye_array(diagonals), np.ones((1, count)))
    used = sparse.diags_array(1 / program.room) @ program.used
    found = milp(
        program.cost.ravel() / (program.cost.max() or 1.0),
        integrality=np.ones(program.cost.size),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(used, -np.inf, 1 - ROUNDING),
        ],
        options={"mip_rel_gap": gap, "node_limit": _NODES},
    )
    if found.x is None:
        return None
    levels: Levels = found.x.reshape(diagonals, count).argmax(axis=1)
    return levels
