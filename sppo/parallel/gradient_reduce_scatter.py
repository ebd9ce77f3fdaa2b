"""Asynchronous reduce-scatters of gradients that overlap the following compute (ZeRO-2 and 3).

Gradients are computed in whole buffers and summed over the ranks; each rank gets its own rows, in
the buffer of the message. Rows are padded to equal sizes in messages
(:mod:`sppo.parallel.row_layout`). A message with one parameter is the buffer of its gradient;
several gradients are copied into one message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from sppo.parallel.collectives import reduce_scatter
from sppo.parallel.data_parallel import rows_of
from sppo.parallel.job.peer_errors import peer_errors
from sppo.parallel.row_layout import PaddedRows, row_layout


class GradientReduceScatter:
    """Reduce-scatter among the ranks over which gradients are sharded.

    Args:
        group: Communicator of these ranks. Nothing else may use it while a reduction is in flight.
        index: Index of this rank in the group.
    """

    def __init__(self, group: ProcessGroup, *, index: int) -> None:
        self.group, self.index, self.count = group, index, group.size()

    def zeros(
        self, shapes: Mapping[str, tuple[int, ...]], *, dtype: torch.dtype, device: torch.device
    ) -> GradientMessage:
        """Return a message with whole gradients, zero at first, that are reduced together.

        Args:
            shapes: Shapes of the whole parameters by name; every rank must make the same calls in
                order.
            dtype: Type of the gradients.
            device: Device of the gradients.
        """
        return GradientMessage(self, shapes, dtype=dtype, device=device)

    def padded_elements(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Return the number of elements, padding included, of one message with these shapes."""
        return self.count * row_layout(shapes, shapes, ranks=self.count)[1]


class GradientMessage:
    """Gradients that are added to while whole, then reduced, then added to this rank's rows.

    Used once: add to `whole`, call :meth:`reduce`, call :meth:`add_to`.

    Args:
        scatter: Reduce-scatter among the ranks.
        shapes: Shapes of the whole parameters by name.
        dtype: Type of the gradients.
        device: Device of the gradients.
    """

    def __init__(
        self,
        scatter: GradientReduceScatter,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._scatter = scatter
        self._parts, self._elements = row_layout(shapes, shapes, ranks=scatter.count)
        self._flat_RN: Tensor | None = None
        self._work: Any = None
        self.whole: dict[str, Tensor] = {}
        """Whole gradients by name, to add to until :meth:`reduce`."""
        if self.is_copied:
            for name, shape in shapes.items():
                self.whole[name] = torch.zeros(shape, dtype=dtype, device=device)
        else:
            (part,) = self._parts
            self._flat_RN = torch.zeros((scatter.count, self._elements), dtype=dtype, device=device)
            self.whole[part.name] = _whole(self._flat_RN, part)
        self.size_bytes = scatter.count * self._elements * dtype.itemsize

    @property
    def is_copied(self) -> bool:
        """True if :meth:`reduce` copies, and so temporarily needs as much memory again."""
        return len(self._parts) > 1

    def reduce(self) -> None:
        """Start to sum the gradients over the ranks; they must not be used afterwards."""
        whole, self.whole = self.whole, {}
        if self._flat_RN is None:
            self._flat_RN = self._copied(whole)
        elif self._parts[0].is_padded(self._scatter.count):
            _spread(self._flat_RN, self._parts[0])
        with peer_errors(f"reducing the gradient of {self._parts[0].name}"):
            self._work = reduce_scatter(
                self._flat_RN[self._scatter.index],
                self._flat_RN.view(-1),
                group=self._scatter.group,
                async_op=True,
            )

    def add_to(self, shards: Mapping[str, Tensor]) -> None:
        """Wait for the reduction and add this rank's rows of the sums to ``shards``, by name."""
        with peer_errors(f"reducing the gradient of {self._parts[0].name}"):
            self._work.wait()
        assert self._flat_RN is not None, "reduce() comes first"
        for part in self._parts:
            shards[part.name].add_(part.own(self._flat_RN, self._scatter.index))
        self._flat_RN = None

    def _copied(self, whole: dict[str, Tensor]) -> Tensor:
        """Return all gradients copied into one message; free each gradient once it is copied."""
        ranks = self._scatter.count
        first = next(iter(whole.values()))
        flat_RN = first.new_empty((ranks, self._elements))
        for part in self._parts:
            gradient = whole.pop(part.name)
            if not part.is_padded(ranks):
                part.within(flat_RN).copy_(gradient.view(ranks, -1))
                continue
            part.within(flat_RN).zero_()
            for rank in range(ranks):
                rows = rows_of(part.shape[0], index=rank, count=ranks)
                part.own(flat_RN, rank).copy_(gradient[rows])
        return flat_RN


def _whole(flat_RN: Tensor, part: PaddedRows) -> Tensor:
    """Return the only gradient of a message as a view, with all padding at the end."""
    return flat_RN.view(-1, *part.shape[1:])[: part.shape[0]]


def _spread(flat_RN: Tensor, part: PaddedRows) -> None:
    """Move the rows of :func:`_whole` in place to the padded layout of a message."""
    ranks = flat_RN.shape[0]
    whole = _whole(flat_RN, part)
    for rank in reversed(range(1, ranks)):  # rows move towards the end
        # Copy first: source and target may overlap.
        own = whole[rows_of(part.shape[0], index=rank, count=ranks)].clone()
        part.own(flat_RN, rank).copy_(own)
