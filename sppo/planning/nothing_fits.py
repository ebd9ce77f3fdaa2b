"""The error of a request that no plan fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sppo.planning.changes import Change
    from sppo.planning.corpus.search import CorpusSolution
    from sppo.planning.search.solver import Solution


class NothingFitsError(MemoryError):
    """Request for which no plan fits into the memory of the machine.

    Attributes:
        solution: Answer of the solver, without a best candidate.
        changes: Changes of the request that would make it fit, the easiest first.
    """

    def __init__(
        self, text: str, solution: Solution | CorpusSolution, changes: Sequence[Change]
    ) -> None:
        super().__init__(text)
        self.solution, self.changes = solution, tuple(changes)
