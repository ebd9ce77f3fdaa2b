"""Collectives of small Python values and numbers over all ranks of a run.

All use gloo, whatever back end carries tensors. Every rank must call the same collectives in the
same order. A rank without peers gets its own values back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

    def decided_by_main(self, decide: Callable[[], T]) -> T:
        """Call `decide` on rank 0 and return its result, or raise its error, on every rank."""
        decided: tuple[T | None, Exception | None] | None = None
        if self._rank == 0:
            try:
                decided = decide(), None
            except Exception as error:
                decided = None, error
        value, problem = self.broadcast(decided)
        if problem is not None:
            raise problem
        return value  # type: ignore[return-value]  # T may itself be None

    def done_by_all(self, act: Callable[[], T]) -> T:
        """Call `act` on every rank and return its result; raise a failure of any rank on all.

        Errors of the first rank that failed are raised, with its number unless it is rank 0.
        """
        done, problem = None, None
        try:
            done = act()
        except Exception as error:
            problem = error
        for rank, failure in enumerate(self.all_gather(problem)):
            if failure is None:
                continue
            if rank and type(failure) in (ValueError, MemoryError):
                raise type(failure)(f"rank {rank}: {failure}")
            raise failure
        return done  # type: ignore[return-value]  # T may itself be None

    def check_same_result(self, what: str, digest: str, *, replica: int | None = None) -> None:
        """Raise ValueError unless all ranks computed the same `digest` from the same input.

        Args:
            what: Name of the digested object, for the message.
            digest: Digest that this rank computed.
            replica: Replica of this rank, to compare it with ranks of the same replica; None to
                compare all ranks.

        Raises:
            ValueError: On every rank; names the ranks that differ from the first.
        """
        told = self.all_gather((replica, digest))
        for replica in dict.fromkeys(whose for whose, _ in told):
            first, *others = (rank for rank, (whose, _) in enumerate(told) if whose == replica)
            different = [rank for rank in others if told[rank] != told[first]]
            if not different:
                continue
            numbers = ", ".join(map(str, different))
            who = f"rank {numbers} has" if len(different) == 1 else f"ranks {numbers} have"
            of_replica = "" if replica is None else " of the same replica"
            raise ValueError(
                f"{who} made another {what} than rank {first}{of_replica}: do all machines run the "
                "same versions of Python and numpy on the same kind of CPU?"
            )

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
