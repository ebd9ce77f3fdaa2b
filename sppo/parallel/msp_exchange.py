"""Messages and collectives among the ranks that run the shards of one unit at a time (MSP).

One of them owns the stage: it has the weights, the keys and values of what came before, and the
sums of gradients. Two communicators, so that what is sent ahead of its use never stands in the way
of what is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from sppo.parallel.data_parallel import add_up, rows_of
from sppo.parallel.job.peer_errors import peer_errors
from sppo.parallel.mesh import Mesh


class MspExchange:
    """The ranks of one range of a pipeline, seen from one of them.

    Args:
        group: for what is waited for.
        ahead: of the same ranks, for what is sent ahead.
        ranks: global ranks of the shards, in order.
        place: index of this rank's shard.
        owner: index of the owner's shard.
        token: one zero on the device, for :meth:`barrier`.
    """

    def __init__(
        self,
        group: ProcessGroup,
        ahead: ProcessGroup,
        *,
        ranks: Sequence[int],
        place: int,
        owner: int,
        token: Tensor,
    ) -> None:
        self._group, self._ahead, self._ranks = group, ahead, tuple(ranks)
        self.place, self.owner, self._token = place, owner, token

    @property
    def is_owner(self) -> bool:
        """Return whether this rank owns the stage."""
        return self.place == self.owner

    @property
    def count(self) -> int:
        """Number of shards."""
        return len(self._ranks)

    def barrier(self) -> None:
        """Let compute go on when that of all ranks is here: shards run at the same time.

        A sum of zeros within the stream; a barrier of NCCL would hold up the host, too.
        """
        with peer_errors("meeting the other shards of a unit"):
            dist.all_reduce(self._token, group=self._group)

    def send_ahead(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Begin to send the owner's ``tensors`` to all; on the others they are filled.

        Returns:
            What to wait for, on every rank, before they are used or changed.
        """
        source = self._ranks[self.owner]
        with peer_errors("sending the weights of a layer ahead"):
            return [
                dist.broadcast(tensor, source, group=self._ahead, async_op=True)
                for tensor in tensors
            ]

    def from_owner(self, tensor: Tensor) -> None:
        """Fill ``tensor`` with the owner's."""
        with peer_errors("hearing from the owner of a stage"):
            dist.broadcast(tensor, self._ranks[self.owner], group=self._group)

    def to_owner_ahead(self, tensor: Tensor) -> Any:
        """Begin to add up ``tensor`` at the owner; what to wait for before it is used or freed."""
        with peer_errors("sending gradients to the owner of a stage"):
            owner = self._ranks[self.owner]
            return dist.reduce(tensor, owner, group=self._ahead, async_op=True)

    def to_owner(self, tensor: Tensor) -> None:
        """Add up ``tensor`` over all ranks, at the owner; elsewhere it is spoilt."""
        with peer_errors("adding up at the owner of a stage"):
            dist.reduce(tensor, self._ranks[self.owner], group=self._group)

    def all_gather(self, parts: Sequence[Tensor]) -> None:
        """Fill ``parts``, one for each rank, with what each rank has in its own."""
        with peer_errors("gathering keys and values of a unit's shards"):
            works = [
                dist.broadcast(part, rank, group=self._group, async_op=True)
                for part, rank in zip(parts, self._ranks, strict=True)
            ]
            for work in works:
                work.wait()

    def scatter(self, parts: Sequence[Tensor] | None, own: Tensor) -> Tensor:
        """Send one of the owner's ``parts`` to each rank; ``own`` has its shape and is filled."""
        with peer_errors("scattering shards of a unit"):
            if parts is None:
                dist.recv(own, self._ranks[self.owner], group=self._group)
                return own
            works = [
                dist.isend(part.contiguous(), rank, group=self._group)
                for place, (part, rank) in enumerate(zip(parts, self._ranks, strict=True))
                if place != self.place
            ]
            for work in works:
                assert work is not None, "a member of the group"
                work.wait()
            return parts[self.place]

    def gather(self, own: Tensor, rows: Sequence[int]) -> Tensor | None:
        """Return all ranks' ``own`` one behind the other, at the owner; None elsewhere.

        Args:
            own: this rank's.
            rows: of each rank's.
        """
        with peer_errors("gathering shards of a unit"):
            if not self.is_owner:
                dist.send(own.contiguous(), self._ranks[self.owner], group=self._group)
                return None
            parts = [own.new_empty((count, *own.shape[1:])) for count in rows]
            parts[self.place] = own
            works = [
                dist.irecv(part, rank, group=self._group)
                for place, (part, rank) in enumerate(zip(parts, self._ranks, strict=True))
                if place != self.place
            ]
            for work in works:
                assert work is not None, "a member of the group"
                work.wait()
            return torch.cat(parts)


class TokenMembers:
    """The ranks over which a shard's tokens are sharded; each sends its part of the weights' rows.

    Args:
        group: of them; None where tokens are not sharded.
        ranks: their global ranks, in order.
        index: this rank's place among them.
    """

    def __init__(
        self, group: ProcessGroup | None, *, ranks: Sequence[int] = (0,), index: int = 0
    ) -> None:
        self._group, self._ranks, self._index = group, tuple(ranks), index

    def own_rows(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a parameter's rows; a view."""
        return tensor[rows_of(tensor.shape[0], index=self._index, count=len(self._ranks))]

    def put_together(self, tensors: Sequence[Tensor]) -> None:
        """Fill ``tensors``, right in :meth:`own_rows`, with the rows of the others."""
        if self._group is None:
            return
        works = []
        with peer_errors("putting a layer's weights together"):
            for tensor in tensors:
                for index, rank in enumerate(self._ranks):
                    rows = rows_of(tensor.shape[0], index=index, count=len(self._ranks))
                    if rows.stop > rows.start:
                        part = tensor[rows]
                        works.append(dist.broadcast(part, rank, group=self._group, async_op=True))
            for work in works:
                assert work is not None, "a member of the group"
                work.wait()

    def add_up(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its sum over all of them."""
        add_up([tensor], self._group, what="adding up a shard's weight gradients")


class MspLinks:
    """Communicators of all ranges of a pipeline whose ranks run shards of the same units.

    Args:
        mesh: whose pipeline this rank belongs to.
        device: where tensors live.
    """

    def __init__(self, mesh: Mesh, *, device: torch.device) -> None:
        self._mesh, self._token = mesh, torch.zeros(1, device=device)
        self._groups: dict[tuple[int, int], tuple[ProcessGroup, ProcessGroup]] = {}
        self._known: set[tuple[int, int]] = set()

    @property
    def members(self) -> TokenMembers:
        """The ranks over which this rank's tokens are sharded."""
        mesh = self._mesh
        return TokenMembers(
            mesh.groups.sequence,
            ranks=mesh.shape.sequence_ranks(mesh.at),
            index=mesh.at.sequence,
        )

    def connect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Make missing groups for ``ranges``, (first, last) positions; every rank must call it."""
        new = sorted({*ranges} - self._known)
        self._known.update(new)
        self._groups |= self._mesh.make_range_groups(new)

    def exchange(self, positions: tuple[int, ...], owner: int) -> MspExchange:
        """Return the communication of ranks at ``positions``; number ``owner`` owns the stage."""
        waited, ahead = self._groups[positions[0], positions[-1]]
        return MspExchange(
            waited,
            ahead,
            ranks=[self._mesh.pipeline_ranks[position] for position in positions],
            place=positions.index(self._mesh.at.pipeline),
            owner=owner,
            token=self._token,
        )
