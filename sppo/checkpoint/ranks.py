"""Ranks that save and load together: what one of them fails at, all of them fail at.

Work on the disk goes wrong on one rank alone, while the others wait in the next collective. So
every part of it runs inside one of the calls below, which end the same way on all ranks.
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
"""Seconds that a rank waits for the disks of others, which takes longer than anything in a step."""

_WAITING = "waiting for what the other ranks do with a checkpoint"

T = TypeVar("T")


class CheckpointRanks:
    """The processes that take part, on a gloo group of their own.

    So a save in the background never meets the collectives of a step, and may wait long.

    Args:
        group: of the same ranks, which all make one of these at the same time; None for a process
            that works alone, for which every call below is a plain call, whether or not
            torch.distributed is in use.
        timeout_s: how long a rank waits for the others.
    """

    def __init__(self, group: ProcessGroup | None, *, timeout_s: float = TIMEOUT_S) -> None:
        self.group = None if group is None else _own_group(group, timeout_s=timeout_s)
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        self._size = 1 if self.group is None else dist.get_world_size(self.group)
        self._first = 0 if self.group is None else dist.get_global_rank(self.group, 0)

    @property
    def is_first(self) -> bool:
        """Return whether this is the rank that does what is done once."""
        return self.rank == 0

    def on_first(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0; every rank gets what it returned or raised.

        Raises:
            PeerLostError: here and below, that another rank has ended.
        """
        if self.group is None:
            return work()
        value, error = _attempt(work) if self.is_first else (None, None)
        value, common = self._tell((value, portable(error)))
        _raise_common(common, own=error)
        return cast(T, value)

    def on_all(self, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank, which gets its own result; one failure is everybody's."""
        results: list[T] = []
        self.gather(lambda: results.append(work()))
        return results[0]

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Run ``work`` as :meth:`on_all` does; rank 0 alone gets the results, in order."""
        if self.group is None:
            return [work()]
        value, error = _attempt(work)
        outcome = (value, portable(error))
        outcomes: list[Any] | None = [None] * self._size if self.is_first else None
        with peer_errors(_WAITING):
            dist.gather_object(outcome, outcomes, dst=self._first, group=self.group)
        failures = {i: e for i, (_, e) in enumerate(outcomes or []) if e is not None}
        _raise_common(self._tell(self.failure(failures) if failures else None), own=error)
        return [value for value, _ in outcomes or []]

    def failure(self, failures: Mapping[int, BaseException]) -> BaseException:
        """Return the error that all ranks raise when these failed; it names the rank of several."""
        rank = min(failures)
        error = failures[rank]
        if self.group is None:
            return error
        if isinstance(error, OSError):
            text = f"rank {rank}: {error.strerror or error}"
            return OSError(error.errno, text) if error.errno else OSError(text)
        error.add_note(f"raised on rank {rank}")
        return error

    def _tell(self, value: Any) -> Any:
        """Rank 0's ``value``, on all ranks."""
        box = [value]
        with peer_errors(_WAITING):
            dist.broadcast_object_list(box, src=self._first, group=self.group)
        return box[0]


def portable(error: BaseException | None) -> BaseException | None:
    """Return ``error``, or one with its text where it cannot travel to another process."""
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
    except BaseException as error:  # interrupts too: the others must not wait for ever
        return None, error


def _raise_common(common: BaseException | None, *, own: BaseException | None) -> None:
    """Raise what all ranks raise, if anything, with this rank's ``own`` error as its cause."""
    if common is None:
        return
    if common is own:
        raise common
    raise common from own
