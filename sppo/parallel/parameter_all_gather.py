"""All-gathers of sharded parameters, which run behind the compute before their use (ZeRO-3).

Rows are sharded as :func:`sppo.parallel.data_parallel.rows_of` does, and padded to equal sizes
on the way. Where they are equal anyway and a parameter travels alone, what arrives is the parameter
and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from sppo.parallel.collectives import all_gather
from sppo.parallel.data_parallel import rows_of
from sppo.parallel.failures import peer_errors


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
        layout, elements = self._layout(rows, shapes)
        flat = next(iter(rows.values())).new_empty((self.count, elements))
        for part in layout:
            own = rows[part.name]
            flat[self.index, part.offset : part.offset + own.numel()] = own.reshape(-1)
        with peer_errors(f"gathering {layout[0].name}"):
            work = all_gather(flat.view(-1), flat[self.index], group=self._group, async_op=True)
        return AllGatherHandle(work, flat, layout)

    def padded_elements(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Elements that parameters of these shapes take on their way."""
        return self.count * self._layout(shapes, shapes)[1]

    def _layout(
        self, names: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[tuple[_GatheredParameter, ...], int]:
        parts, offset = [], 0
        for name in names:
            part = _GatheredParameter(name, shapes[name], offset, -(-shapes[name][0] // self.count))
            parts.append(part)
            offset += part.padded_rows * part.row_elements
        return tuple(parts), offset


@dataclass(frozen=True, slots=True)
class _GatheredParameter:
    """One parameter in what a rank sends: where it begins there, and rows with padding."""

    name: str
    shape: tuple[int, ...]
    offset: int
    padded_rows: int

    @property
    def row_elements(self) -> int:
        return prod(self.shape[1:])


class AllGatherHandle:
    """Parameters on their way; :meth:`finish` yields them, once.

    Args:
        work: of the collective.
        flat_RN: what every rank sends, R ranks of N elements.
        parts: what lies where in it.
    """

    def __init__(self, work: Any, flat_RN: Tensor, parts: tuple[_GatheredParameter, ...]) -> None:
        self._work, self._flat_RN, self._parts = work, flat_RN, parts
        self.size_bytes = flat_RN.numel() * flat_RN.element_size()

    @property
    def is_copied(self) -> bool:
        """Whether :meth:`finish` needs as much memory again as the gathered rows."""
        return len(self._parts) > 1

    def finish(self) -> dict[str, Tensor]:
        """Whole parameters by name, once they are here."""
        with peer_errors(f"gathering {self._parts[0].name}"):
            self._work.wait()
        if not self.is_copied:
            (part,) = self._parts
            return {part.name: _compacted(self._flat_RN, part)}
        return {part.name: _copied(self._flat_RN, part) for part in self._parts}


def _copied(flat_RN: Tensor, part: _GatheredParameter) -> Tensor:
    """One parameter out of what many have sent, in memory of its own."""
    ranks, width = flat_RN.shape[0], part.row_elements
    whole = flat_RN.new_empty(part.shape)
    sent = flat_RN[:, part.offset : part.offset + part.padded_rows * width]
    if part.shape[0] == ranks * part.padded_rows:
        whole.view(ranks, -1).copy_(sent)
        return whole
    for rank in range(ranks):
        own = rows_of(part.shape[0], index=rank, count=ranks)
        rows = own.stop - own.start
        whole[own].copy_(sent[rank, : rows * width].view(rows, *part.shape[1:]))
    return whole


def _compacted(flat_RN: Tensor, part: _GatheredParameter) -> Tensor:
    """The one parameter that was sent, where it lies: only padding has to go."""
    ranks = flat_RN.shape[0]
    whole = flat_RN.view(ranks * part.padded_rows, *part.shape[1:])
    if whole.shape[0] == part.shape[0]:
        return whole
    for rank in range(1, ranks):
        own = rows_of(part.shape[0], index=rank, count=ranks)
        begin = rank * part.padded_rows
        # A copy in between, for the two places may overlap.
        whole[own] = whole[begin : begin + own.stop - own.start].clone()
    return whole[: part.shape[0]]
