"""Collectives of small Python values and numbers over all ranks of a run.

All use gloo, whatever back end carries tensors. Every rank must call the same collectives in the
same order. A rank without peers gets its own values back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sppo.parallel.job.facts import difference_report
from sppo.parallel.job.peer_errors import peer_errors
from sppo.parallel.mesh import Mesh

T = TypeVar("T")


class HostCollectives:
    """Collectives over all ranks of ``mesh``."""

    def __init__(self, mesh: Mesh) -> None:
        self._group, self._rank = mesh.groups.world, mesh.rank
        self._count = mesh.shape.num_ranks

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over all ranks, in float64, the same on every rank."""
        return self._reduced(values, dist.ReduceOp.SUM, "adding up figures")

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the maximum of each value over all ranks."""
        return self._reduced(values, dist.ReduceOp.MAX, "comparing figures")

    def any(self, here: bool) -> bool:
        """Return whether ``here`` is true on any rank."""
        return self.largest([float(here)]) == [1.0]

    def all_gather(self, value: T) -> list[T]:
        """Return the value of every rank, by rank."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self._count
        with peer_errors("hearing from every rank"):
            dist.all_gather_object(found, value, group=self._group)
        return found

    def broadcast(self, value: T | None) -> T:
        """Return the value of rank 0; values of other ranks are ignored."""
        if self._group is not None:
            box: list[Any] = [value]
            with peer_errors("hearing what rank 0 decides, together with all ranks"):
                dist.broadcast_object_list(box, src=0, group=self._group)
            value = box[0]
        assert value is not None, "rank 0 has something to say"
        return value

    def check_same(self, facts: Mapping[str, str]) -> None:
        """Raise ValueError unless all ranks have the same facts.

        Args:
            facts: Facts of this rank by name, such as the version of SPPO.

        Raises:
            ValueError: On every rank the same; names the ranks and facts that differ, with both
                values.
        """
        report = difference_report(self.all_gather(dict(facts)))
        if report:
            raise ValueError(report)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.total([0.0])

    def _reduced(self, values: Sequence[float], how: Any, what: str) -> list[float]:
        if self._group is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        with peer_errors(what):
            dist.all_reduce(tensor, op=how, group=self._group)
        return [float(value) for value in tensor]
