"""Messages and collectives among the ranks of an MSP group.

One rank of the group owns the stage: it has the weights, the keys and values of the prefix, and the
gradient sums. There are two communicators per group, so that messages sent ahead of their use never
delay messages that are waited for at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from sppo.parallel.collectives import all_gather
from sppo.parallel.flat_row import FlatRow, Shapes
from sppo.parallel.job.peer_errors import peer_errors
from sppo.parallel.mesh import Mesh, first_messages


def _wait_for(works: Iterable[Any]) -> None:
    """Wait for messages, after all of them were started."""
    for work in [*works]:
        assert work is not None, "a member of the group"
        work.wait()


class TokenMembers:
    """Sequence-parallel ranks of an MSP shard; each sends its part of weights and gradients.

    Args:
        group: Communicator of these ranks; None if tokens are not sharded.
        ranks: Global ranks, in order.
        index: Index of this rank among them.
    """

    def __init__(self, group: ProcessGroup | None, *, ranks: Sequence[int], index: int) -> None:
        self._group, self._ranks, self._index = group, tuple(ranks), index

    def layout(self, shapes: Shapes) -> FlatRow:
        """Return the layout of a row of parameters, of which each rank sends its interval."""
        return FlatRow(shapes, ranks=len(self._ranks), rank=self._index)

    def put_together(self, row: Tensor, layout: FlatRow) -> None:
        """Fill a row, of which each rank has its interval, with the intervals of other ranks."""
        if self._group is not None:
            all_gather(row, row[layout.own], group=self._group)

    def own_rows(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a gradient's rows, as equal as possible, as a view."""
        rows, count = tensor.shape[0], len(self._ranks)
        return tensor[rows * self._index // count : rows * (self._index + 1) // count]

    def add_up(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its sum over these ranks."""
        if self._group is not None:
            dist.all_reduce(tensor, group=self._group)


class MspExchange:
    """Communication of one rank with the other ranks of its MSP group.

    Args:
        group: Communicator of messages that are waited for at once.
        ahead: Communicator of the same ranks for messages sent ahead.
        ranks: Global ranks of the shards, in order.
        shard_index: Index of this rank's shard.
        owner: Index of the owner's shard.
        members: Ranks over which this rank's tokens are sharded.
        token: Tensor with one zero on the device, for :meth:`barrier`.
    """

    def __init__(
        self,
        group: ProcessGroup,
        ahead: ProcessGroup,
        *,
        ranks: Sequence[int],
        shard_index: int,
        owner: int,
        members: TokenMembers,
        token: Tensor,
    ) -> None:
        self._group, self._ahead, self._ranks = group, ahead, tuple(ranks)
        self.shard_index, self.owner, self._token = shard_index, owner, token
        self.members = members

    @property
    def is_owner(self) -> bool:
        """True if this rank owns the stage."""
        return self.shard_index == self.owner

    @property
    def count(self) -> int:
        """Number of shards."""
        return len(self._ranks)

    def barrier(self) -> None:
        """Make compute wait until all ranks reach this point, so that shards run at the same time.

        Implemented as a sum of zeros in the stream; NCCL's barrier would block the host, too.
        """
        dist.all_reduce(self._token, group=self._group)

    def send_ahead(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Start to broadcast the owner's ``tensors``; on other ranks ``tensors`` are filled.

        Returns:
            Handles to wait on, on every rank, before the tensors are used or changed.
        """
        source = self._ranks[self.owner]
        return [
            dist.broadcast(tensor, source, group=self._ahead, async_op=True) for tensor in tensors
        ]

    def from_owner(self, tensor: Tensor) -> None:
        """Broadcast the owner's ``tensor``; on other ranks ``tensor`` is filled."""
        dist.broadcast(tensor, self._ranks[self.owner], group=self._group)

    def to_owner_ahead(self, tensor: Tensor) -> Any:
        """Start to sum ``tensor`` at the owner; return the handle to wait on before its reuse."""
        owner = self._ranks[self.owner]
        return dist.reduce(tensor, owner, group=self._ahead, async_op=True)

    def to_owner(self, tensor: Tensor) -> None:
        """Sum ``tensor`` over all ranks at the owner; on other ranks it is then undefined."""
        dist.reduce(tensor, self._ranks[self.owner], group=self._group)

    def all_gather(self, parts: Sequence[Tensor]) -> None:
        """Fill ``parts``, one tensor per rank, each with the tensor of its rank."""
        _wait_for(
            dist.broadcast(part, rank, group=self._group, async_op=True)
            for part, rank in zip(parts, self._ranks, strict=True)
        )

    def scatter(self, parts: Sequence[Tensor] | None, own: Tensor) -> Tensor:
        """Return this rank's part of the owner's ``parts``; ``own`` is a buffer of its shape."""
        if parts is None:
            dist.recv(own, self._ranks[self.owner], group=self._group)
            return own
        _wait_for(
            dist.isend(part.contiguous(), rank, group=self._group)
            for part, rank in self._others(parts)
        )
        return parts[self.shard_index]

    def gather(self, own: Tensor, rows: Sequence[int]) -> Tensor | None:
        """Return the concatenation of all ranks' tensors on the owner; None on other ranks.

        Args:
            own: Tensor of this rank.
            rows: Number of rows of each rank's tensor.
        """
        if not self.is_owner:
            dist.send(own.contiguous(), self._ranks[self.owner], group=self._group)
            return None
        parts = [own.new_empty((count, *own.shape[1:])) for count in rows]
        parts[self.shard_index] = own
        _wait_for(dist.irecv(part, rank, group=self._group) for part, rank in self._others(parts))
        return torch.cat(parts)

    def _others(self, parts: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
        """Return the tensors of the other ranks, each with its global rank."""
        of_ranks = [*zip(parts, self._ranks, strict=True)]
        return of_ranks[: self.shard_index] + of_ranks[self.shard_index + 1 :]


class MspLinks:
    """Communicators of the MSP groups of this rank's pipeline.

    Args:
        mesh: Mesh of all ranks, connected.
        device: Device of the tensors.
    """

    def __init__(self, mesh: Mesh, *, device: torch.device) -> None:
        self._mesh, self._token = mesh, torch.zeros(1, device=device)
        self._members = TokenMembers(
            mesh.groups.sequence, ranks=mesh.shape.sequence_ranks(mesh.at), index=mesh.at.sequence
        )
        self._groups: dict[tuple[int, int], tuple[ProcessGroup, ProcessGroup]] = {}
        self._known: set[tuple[int, int]] = set()

    def connect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Make missing communicators for ``ranges`` (first, last); every rank must call it.

        NCCL allocates their buffers here, at first messages.
        """
        new = sorted({*ranges} - self._known)
        self._known.update(new)
        made = self._mesh.make_range_groups(new)
        self._groups |= made
        if self._mesh.uses_nccl:
            with peer_errors("sending first messages to the other shards"):
                for group in chain.from_iterable(made.values()):
                    first_messages(group, device=self._token.device)

    def exchange(self, positions: tuple[int, ...], owner: int) -> MspExchange:
        """Return the communication of the MSP group at ``positions``, owned by ``[owner]``."""
        waited, ahead = self._groups[positions[0], positions[-1]]
        return MspExchange(
            waited,
            ahead,
            ranks=[self._mesh.pipeline_ranks[position] for position in positions],
            shard_index=positions.index(self._mesh.at.pipeline),
            owner=owner,
            members=self._members,
            token=self._token,
        )
