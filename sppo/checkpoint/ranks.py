"""Collectives of the ranks that save and load a checkpoint: an error on one is raised on all.

Disk work may fail on one rank while the others wait in the next collective. Therefore every part of
it runs inside a call of :class:`CheckpointRanks`, which ends the same way on all ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup

from sppo.parallel.job.peer_errors import peer_errors

TIMEOUT_S = 7200.0
"""Seconds that a rank waits for other ranks' disk work, which takes longer than a step."""

_WAITING = "waiting for what the other ranks do with a checkpoint, for ten times parallel.timeout_s"

T = TypeVar("T")


class CheckpointRanks:
    """Ranks that take part in checkpoints, with a gloo group of their own.

    The own group keeps a background save apart from the collectives of a step, and has a longer
    timeout.

    Args:
        group: Process group of the ranks, which all create this object at the same time; None for
            a single process, for which all methods are plain calls, whether or not
            torch.distributed is in use.
        timeout_s: Longest time in seconds that a rank waits for the others.
    """

    def __init__(self, group: ProcessGroup | None, *, timeout_s: float = TIMEOUT_S) -> None:
        self.group = None if group is None else _own_group(group, timeout_s=timeout_s)
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        self._size = 1 if self.group is None else dist.get_world_size(self.group)
        self._first = 0 if self.group is None else dist.get_global_rank(self.group, 0)

    @property
    def is_first(self) -> bool:
        """True if this is rank 0 of the group, which does the work that is done once."""
        return self.rank == 0

    def on_first(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0, and return its result, or raise its error, on every rank.

        Raises:
            PeerLostError: Another rank has ended. The other methods raise this error, too.
        """
        if self.group is None:
            return work()
        value, error = _attempt(work) if self.is_first else (None, None)
        value, common = self._broadcast((value, portable(error)))
        _raise_common(common, own=error)
        return cast(T, value)

    def on_all(self, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank, and return its own result; an error is raised on each."""
        results: list[T] = []
        self.gather(lambda: results.append(work()))
        return results[0]

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Run ``work`` on every rank; return all results by rank on rank 0, and [] on others.

        As in :meth:`on_all`, an error on one rank is raised on all.
        """
        if self.group is None:
            return [work()]
        value, error = _attempt(work)
        outcome = (value, portable(error))
        outcomes: list[Any] | None = [None] * self._size if self.is_first else None
        with peer_errors(_WAITING):
            dist.gather_object(outcome, outcomes, dst=self._first, group=self.group)
        failures = {i: e for i, (_, e) in enumerate(outcomes or []) if e is not None}
        _raise_common(self._broadcast(self.failure(failures) if failures else None), own=error)
        return [value for value, _ in outcomes or []]

    def failure(self, failures: Mapping[int, BaseException]) -> BaseException:
        """Return the error that all ranks raise: of the first failed rank, whose number is added.

        Args:
            failures: Errors by rank.
        """
        rank = min(failures)
        error = failures[rank]
        if self.group is None:
            return error
        if isinstance(error, OSError):
            text = f"rank {rank}: {error.strerror or error}"
            return OSError(error.errno, text) if error.errno else OSError(text)
        error.add_note(f"raised on rank {rank}")
        return error

    def _broadcast(self, value: Any) -> Any:
        """Broadcast ``value`` of rank 0, and return it on all ranks."""
        box = [value]
        with peer_errors(_WAITING):
            dist.broadcast_object_list(box, src=self._first, group=self.group)
        return box[0]


def portable(error: BaseException | None) -> BaseException | None:
    """Return ``error``, or a RuntimeError with its text if ``error`` cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _own_group(group: ProcessGroup, *, timeout_s: float) -> ProcessGroup:
    with peer_errors("connecting with the other ranks for checkpoints"):
        own: ProcessGroup | None = dist.new_group(
            dist.get_process_group_ranks(group),
            backend="gloo",
            timeout=timedelta(seconds=timeout_s),
            use_local_synchronization=True,
            group_desc="checkpoint",
        )
    assert own is not None, "every rank is a member"
    return own


def _attempt(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return work(), None
    except BaseException as error:  # also interrupts: the other ranks must not wait forever
        return None, error


def _raise_common(common: BaseException | None, *, own: BaseException | None) -> None:
    """Raise ``common``, the error of all ranks, if any, with this rank's ``own`` as its cause."""
    if common is None:
        return
    if common is own:
        raise common
    raise common from own
