"""Collectives of Python values and numbers over all ranks of a run, in host memory.

All use gloo, whatever back end carries tensors. Every rank must call the same collectives in the
same order. A rank without peers gets its own values back.

Work on the host, above all on a disk, may fail on one rank while the others wait in the next
collective. Inside :meth:`HostCollectives.decided_by_main`, :meth:`HostCollectives.done_by_all` and
:meth:`HostCollectives.told_to_main` such work ends the same way on all ranks.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from sppo.parallel.job.peer_errors import peer_errors

T = TypeVar("T")

_MOST_LINES = 15
"""Most lines of a report of facts that differ."""


class HostCollectives:
    """Collectives over the ranks of a group; all raise PeerLostError if another rank has ended.

    Args:
        group: Ranks, connected over gloo; None for a single process, for which all methods are
            plain calls, whether or not torch.distributed is in use.
        why: What the ranks do together, if errors are to say it, such as ``, for a checkpoint``.
    """

    def __init__(self, group: ProcessGroup | None, *, why: str = "") -> None:
        self.group, self._why = group, why
        self.rank = 0 if group is None else group.rank()
        self._count = 1 if group is None else group.size()

    @classmethod
    def in_new_group(
        cls, group: ProcessGroup | None, *, timeout_s: float, why: str
    ) -> HostCollectives:
        """Return collectives in a new group of the same ranks, which all call this together.

        Collectives in a group of their own may run in another thread, and may take longer.

        Args:
            group: Ranks; None for a single process.
            timeout_s: Longest time in seconds that a rank waits for the others.
            why: As in the constructor.
        """
        if group is None:
            return cls(None)
        with peer_errors(f"connecting with the other ranks{why}"):
            own: ProcessGroup | None = dist.new_group(
                dist.get_process_group_ranks(group),
                backend="gloo",
                timeout=timedelta(seconds=timeout_s),
                use_local_synchronization=True,
                group_desc="host",
            )
        return cls(own, why=why)

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
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self._count
        self._run("hearing from every rank", dist.all_gather_object, found, value)
        return found

    def broadcast(self, value: T | None) -> T:
        """Return the value of rank 0; values of other ranks are ignored."""
        if self.group is not None:
            box: list[Any] = [value]
            self._run("hearing what rank 0 decides", dist.broadcast_object_list, box, group_src=0)
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
        if self.group is None:
            return decide()
        value, error = _attempt(decide) if self.rank == 0 else (None, None)
        value, problem = self.broadcast((value, portable(error)))
        if problem is not None:
            raise problem from error
        return cast(T, value)

    def done_by_all(self, act: Callable[[], T]) -> T:
        """Call `act` on every rank and return its result; raise a failure of any rank on all.

        The error is that of the first rank that failed, as :meth:`of_rank` names it.
        """
        if self.group is None:
            return act()
        done, error = _attempt(act)
        for rank, problem in enumerate(self.all_gather(portable(error))):
            if problem is not None:
                raise self.of_rank(problem, rank) from error
        return cast(T, done)

    def told_to_main(self, act: Callable[[], T]) -> list[T]:
        """As :meth:`done_by_all`, but return all results by rank on rank 0, and [] on others."""
        done = self.done_by_all(act)
        if self.group is None:
            return [done]
        found: list[Any] | None = [None] * self._count if self.rank == 0 else None
        self._run("telling rank 0", dist.gather_object, done, found, group_dst=0)
        return found or []

    def of_rank(self, error: BaseException, rank: int) -> BaseException:
        """Return an error that all ranks raise, with the number of the rank on which it occurred.

        Errors of the system name every rank, since each machine has its own disks; rank 0 is not
        named in a ValueError or MemoryError, which all ranks may have alike.
        """
        if self.group is None:
            return error
        if isinstance(error, OSError):
            text = f"rank {rank}: {error.strerror or error}"
            return OSError(error.errno, text) if error.errno else OSError(text)
        if rank and type(error) in (ValueError, MemoryError):
            return type(error)(f"rank {rank}: {error}")
        error.add_note(f"raised on rank {rank}")
        return error

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
        if self.group is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        self._run(what, dist.all_reduce, tensor, op=how)
        return [float(value) for value in tensor]

    def _run(
        self, what: str, collective: Callable[..., object], *args: Any, **options: Any
    ) -> None:
        """Run a collective; the error of a lost peer says what was done, and why."""
        with peer_errors(f"{what}{self._why}"):
            collective(*args, group=self.group, **options)


def portable(error: BaseException | None) -> BaseException | None:
    """Return ``error``, or a RuntimeError with its text if ``error`` cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _attempt(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return work(), None
    except (Exception, KeyboardInterrupt) as error:  # the other ranks must not wait forever
        return None, error


def flat_facts(values: Mapping[str, Any], *, prefix: str = "") -> dict[str, str]:
    """Return nested ``values`` as one fact per leaf, so that differences are reported by key.

    For example ``{"a.b": "1"}`` for ``{"a": {"b": 1}}``.
    """
    facts: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            facts |= flat_facts(value, prefix=f"{name}.")
        else:
            facts[name] = json.dumps(value)
    return facts


def difference_report(facts: Sequence[Mapping[str, str]]) -> str:
    """Return the error message for ranks with different facts; "" if all ranks have equal facts.

    Args:
        facts: Facts of every rank, in order of rank.
    """
    lines = [f"  {line}" for line in _differences(facts)]
    if not lines:
        return ""
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"  and {len(lines) - _MOST_LINES} more"]
    return (
        "the ranks of a job must all run the same, and these do not:\n"
        + "\n".join(lines)
        + "\nstart every rank from the same installation with the same command and the same data"
    )


def _differences(facts: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield one line for each value that differs from the value on rank 0."""
    for name in dict.fromkeys(name for values in facts for name in values):
        expected = facts[0].get(name, "nothing")
        others: dict[str, list[str]] = {}
        for rank, values in enumerate(facts):
            value = values.get(name, "nothing")
            if value != expected:
                others.setdefault(value, []).append(str(rank))
        for value, ranks in others.items():
            who = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
            yield f"{name}: {expected} on rank 0, {value} on {who}"
