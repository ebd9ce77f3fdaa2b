"""Asynchronous all-gathers of sharded parameters that overlap the preceding compute (ZeRO-3).

Rows are padded to equal sizes in messages (:mod:`sppo.parallel.row_layout`). If a message has one
parameter and no padding, the received buffer is the parameter and nothing is copied.
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
    """All-gather among the ranks over which parameters are sharded.

    Args:
        group: Communicator of these ranks. Nothing else may use it, because gathers overlap the
            reduction of gradients.
        index: Index of this rank in the group.
    """

    def __init__(self, group: ProcessGroup, *, index: int) -> None:
        self._group, self.index, self.count = group, index, group.size()

    def begin(
        self, rows: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
    ) -> AllGatherHandle:
        """Start to gather parameters in one message; every rank must make the same calls in order.

        Args:
            rows: This rank's rows by name, all of one dtype; a parameter with fewer rows than ranks
                may have none here.
            shapes: Shapes of the whole parameters by name.
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
        """Return the number of elements, padding included, of one message with these shapes."""
        return self.count * row_layout(shapes, shapes, ranks=self.count)[1]


class AllGatherHandle:
    """Gather in flight; :meth:`finish` returns the parameters and may be called once.

    Args:
        work: Handle of the collective.
        flat_RN: Received message, N elements from each of R ranks.
        parts: Layout of the message.
    """

    def __init__(self, work: Any, flat_RN: Tensor, parts: tuple[PaddedRows, ...]) -> None:
        self._work, self._flat_RN, self._parts = work, flat_RN, parts
        self.size_bytes = flat_RN.numel() * flat_RN.element_size()

    @property
    def is_copied(self) -> bool:
        """True if :meth:`finish` copies, and so needs as much memory again as the message."""
        return len(self._parts) > 1

    def finish(self) -> dict[str, Tensor]:
        """Wait for the message and return the whole parameters by name."""
        with peer_errors(f"gathering {self._parts[0].name}"):
            self._work.wait()
        if not self.is_copied:
            (part,) = self._parts
            return {part.name: _compacted(self._flat_RN, part)}
        return {part.name: _copied(self._flat_RN, part) for part in self._parts}


def _copied(flat_RN: Tensor, part: PaddedRows) -> Tensor:
    """Return a copy of one parameter of a message with several."""
    ranks = flat_RN.shape[0]
    whole = flat_RN.new_empty(part.shape)
    if not part.is_padded(ranks):
        whole.view(ranks, -1).copy_(part.within(flat_RN))
        return whole
    for rank in range(ranks):
        whole[rows_of(part.shape[0], index=rank, count=ranks)].copy_(part.own(flat_RN, rank))
    return whole


def _compacted(flat_RN: Tensor, part: PaddedRows) -> Tensor:
    """Return the only parameter of a message as a view, after moving rows over the padding."""
    ranks = flat_RN.shape[0]
    whole = flat_RN.view(ranks * part.count, *part.shape[1:])
    if not part.is_padded(ranks):
        return whole
    for rank in range(1, ranks):
        # Copy first: source and target may overlap.
        own = part.own(flat_RN, rank).clone()
        whole[rows_of(part.shape[0], index=rank, count=ranks)] = own
    return whole[: part.shape[0]]
