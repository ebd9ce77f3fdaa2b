"""All-gathers of sharded parameters, which run behind the compute before their use (ZeRO-3).

Rows are padded to equal sizes on the way (:mod:`sppo.parallel.row_layout`). Where they are equal
anyway and a parameter travels alone, what arrives is the parameter and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from sppo.parallel.collectives import all_gather
from sppo.parallel.data_parallel import rows_of
from sppo.parallel.job.peer_errors import peer_errors
from sppo.parallel.row_layout import PaddedRows, row_layout


class ParameterAllGather:
    """Gathers among the ranks over which parameters are sharded.

    Args:
        group: of these ranks. Nothing else may use it: gathers are under way while gradients are
            added up.
        index: this rank's place among them.
    """

    def __init__(self, group: ProcessGroup, *, index: int) -> None:
        self._group, self.index, self.count = group, index, group.size()

    def begin(
        self, rows: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
    ) -> AllGatherHandle:
        """Start to gather parameters, all in one message; every rank the same ones in turn.

        Args:
            rows: this rank's rows by name, all of one dtype; none of a parameter that has too few.
            shapes: of the whole parameters.
        """
        layout, elements = row_layout(rows, shapes, ranks=self.count)
        flat = next(iter(rows.values())).new_empty((self.count, elements))
        for part in layout:
            own = rows[part.name]
            flat[self.index, part.offset : part.offset + own.numel()] = own.reshape(-1)
        with peer_errors(f"gathering {layout[0].name}"):
            work = all_gather(flat.view(-1), flat[self.index], group=self._group, async_op=True)
        return AllGatherHandle(work, flat, layout)

    def padded_elements(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Elements that parameters of these shapes take on their way."""
        return self.count * row_layout(shapes, shapes, ranks=self.count)[1]


class AllGatherHandle:
    """Parameters on their way; :meth:`finish` yields them, once.

    Args:
        work: of the collective.
        flat_RN: what every rank sends, R ranks of N elements.
        parts: what lies where in it.
    """

    def __init__(self, work: Any, flat_RN: Tensor, parts: tuple[PaddedRows, ...]) -> None:
        self._work, self._flat_RN, self._parts = work, flat_RN, parts
        self.size_bytes = flat_RN.numel() * flat_RN.element_size()

    @property
    def is_copied(self) -> bool:
        """Return whether :meth:`finish` needs as much memory again as the gathered rows."""
        return len(self._parts) > 1

    def finish(self) -> dict[str, Tensor]:
        """Whole parameters by name, once they are here."""
        with peer_errors(f"gathering {self._parts[0].name}"):
            self._work.wait()
        if not self.is_copied:
            (part,) = self._parts
            return {part.name: _compacted(self._flat_RN, part)}
        return {part.name: _copied(self._flat_RN, part) for part in self._parts}


def _copied(flat_RN: Tensor, part: PaddedRows) -> Tensor:
    """One parameter out of what many have sent, in memory of its own."""
    ranks = flat_RN.shape[0]
    whole = flat_RN.new_empty(part.shape)
    if not part.is_padded(ranks):
        whole.view(ranks, -1).copy_(part.within(flat_RN))
        return whole
    for rank in range(ranks):
        whole[rows_of(part.shape[0], index=rank, count=ranks)].copy_(part.own(flat_RN, rank))
    return whole


def _compacted(flat_RN: Tensor, part: PaddedRows) -> Tensor:
    """The one parameter that was sent, where it lies: only padding has to go."""
    ranks = flat_RN.shape[0]
    whole = flat_RN.view(ranks * part.count, *part.shape[1:])
    if not part.is_padded(ranks):
        return whole
    for rank in range(1, ranks):
        # A copy in between, for the two places may overlap.
        own = part.own(flat_RN, rank).clone()
        whole[rows_of(part.shape[0], index=rank, count=ranks)] = own
    return whole[: part.shape[0]]
