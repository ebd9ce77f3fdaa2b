"""Messages among ranks over which parameters are sharded by rows (ZeRO-2 and 3).

Gathers of weights overlap the preceding compute, and reductions of gradients the following compute.
A message has the layout of :mod:`sppo.parallel.row_layout`. If it has one parameter, its buffer is
the whole parameter or gradient itself, and nothing is copied but rows that padding displaces;
several parameters are copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from sppo.parallel.collectives import all_gather, reduce_scatter
from sppo.parallel.job.peer_errors import peer_errors
from sppo.parallel.row_layout import PaddedRows, RowLayout, Shapes


class _Message:
    """One collective among ranks over which parameters are sharded.

    Args:
        group: Communicator of these ranks. Nothing else may use it while a message is in flight,
            and every rank must send the same messages in the same order.
        shapes: Shapes of the whole parameters in the message by name.
        dtype: Type of the message.
        what: What the message does, for errors.
    """

    def __init__(
        self, group: ProcessGroup, shapes: Shapes, *, dtype: torch.dtype, what: str
    ) -> None:
        self._group, self._rank = group, group.rank()
        layout = RowLayout.of(shapes, ranks=group.size())
        self._parts, self._shape = layout.parts, (group.size(), layout.elements)
        self._what = f"{what} {self._parts[0].name}"
        self._flat_RN: Tensor | None = None
        self._work: Any = None
        self.size_bytes = group.size() * layout.elements * dtype.itemsize

    @property
    def is_copied(self) -> bool:
        """True if parameters are copied, so that the message takes as much memory again."""
        return len(self._parts) > 1

    def _received(self) -> Tensor:
        """Wait for the collective, and return its message."""
        with peer_errors(self._what):
            self._work.wait()
        assert self._flat_RN is not None, "begun before"
        flat_RN, self._flat_RN = self._flat_RN, None
        return flat_RN


class ParameterMessage(_Message):
    """Gather of parameters in flight; :meth:`finish` returns them and may be called once.

    Args:
        group: Communicator of the ranks.
        rows: This rank's rows by name, all of one dtype; a parameter with fewer rows than ranks may
            have none here.
        shapes: Shapes of the whole parameters by name.
    """

    def __init__(self, group: ProcessGroup, rows: Mapping[str, Tensor], shapes: Shapes) -> None:
        first = next(iter(rows.values()))
        super().__init__(group, shapes, dtype=first.dtype, what="gathering")
        self._flat_RN = first.new_empty(self._shape)
        own_N = self._flat_RN[self._rank]
        for part in self._parts:
            part.own(own_N, self._rank).copy_(rows[part.name])
        with peer_errors(self._what):
            self._work = all_gather(self._flat_RN.view(-1), own_N, group=group, async_op=True)

    def finish(self) -> dict[str, Tensor]:
        """Wait for the message and return the whole parameters by name."""
        flat_RN = self._received()
        if not self.is_copied:
            (part,) = self._parts
            return {part.name: _compacted(flat_RN, part)}
        found = {}
        for part in self._parts:
            whole = found[part.name] = flat_RN.new_empty(part.shape)
            for sent, rows in part.pairs(flat_RN, whole):
                rows.copy_(sent)
        return found


class GradientMessage(_Message):
    """Gradients that are added to while whole, then reduced, then added to this rank's rows.

    Used once: add to `whole`, call :meth:`reduce`, call :meth:`add_to`.

    Args:
        group: Communicator of the ranks.
        shapes: Shapes of the whole parameters by name.
        dtype: Type of the gradients.
        device: Device of the gradients.
    """

    def __init__(
        self, group: ProcessGroup, shapes: Shapes, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(group, shapes, dtype=dtype, what="reducing the gradient of")
        self.whole: dict[str, Tensor] = {}
        """Whole gradients by name, to add to until :meth:`reduce`."""
        if self.is_copied:
            for name, shape in shapes.items():
                self.whole[name] = torch.zeros(shape, dtype=dtype, device=device)
        else:
            (part,) = self._parts
            self._flat_RN = torch.zeros(self._shape, dtype=dtype, device=device)
            self.whole[part.name] = _whole(self._flat_RN, part)

    def reduce(self) -> None:
        """Start to sum the gradients over the ranks; they must not be used afterwards."""
        whole, self.whole = self.whole, {}
        if self._flat_RN is None:
            self._flat_RN = self._copied(whole)
        elif self._parts[0].is_padded:
            _spread(self._flat_RN, self._parts[0])
        with peer_errors(self._what):
            self._work = reduce_scatter(
                self._flat_RN[self._rank],
                self._flat_RN.view(-1),
                group=self._group,
                async_op=True,
            )

    def add_to(self, shards: Mapping[str, Tensor]) -> None:
        """Wait for the reduction and add this rank's rows of the sums to ``shards``, by name."""
        own_N = self._received()[self._rank]
        for part in self._parts:
            shards[part.name].add_(part.own(own_N, self._rank))

    def _copied(self, whole: dict[str, Tensor]) -> Tensor:
        """Return all gradients copied into one message; free each gradient once it is copied."""
        first = next(iter(whole.values()))
        flat_RN = first.new_empty(self._shape)
        for part in self._parts:
            gradient = whole.pop(part.name)
            if part.is_padded:
                flat_RN[:, part.offset : part.offset + part.elements].zero_()
            for sent, rows in part.pairs(flat_RN, gradient):
                sent.copy_(rows)
        return flat_RN


def _whole(flat_RN: Tensor, part: PaddedRows) -> Tensor:
    """Return the only parameter of a message as a view, with all padding at the end."""
    return flat_RN.view(-1, *part.shape[1:])[: part.shape[0]]


def _compacted(flat_RN: Tensor, part: PaddedRows) -> Tensor:
    """Return :func:`_whole`, after moving the rows of all ranks in place over the padding."""
    whole = _whole(flat_RN, part)
    if part.is_padded:
        for rank in range(1, part.ranks):  # rows move towards the beginning
            # Copy first: source and target may overlap.
            whole[part.rows(rank)] = part.own(flat_RN[rank], rank).clone()
    return whole


def _spread(flat_RN: Tensor, part: PaddedRows) -> None:
    """Move the rows of :func:`_whole` in place to the padded layout of a message."""
    whole = _whole(flat_RN, part)
    for rank in reversed(range(1, part.ranks)):  # rows move towards the end
        # Copy first: source and target may overlap.
        part.own(flat_RN[rank], rank).copy_(whole[part.rows(rank)].clone())
