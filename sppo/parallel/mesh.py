"""Process groups of the grid of ranks, with their members and back ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from sppo.cost.communicators import OVERLAP_MAX_CTAS, CommunicatorUse
from sppo.parallel.job.peer_errors import peer_errors
from sppo.parallel.mesh_shape import MeshShape

_FIRST_ELEMENTS = (1, 8 << 20)
"""Sizes of the first sums of a group, in fp32: of trees, and of what long messages take."""
ReplicaGroup = Literal["stage", "keys", "block"]
"""Ranks that hold the same values of a parameter: those of the same stage; of these, those with the
same shard of the weights (Megatron), or with the same shard of the key/value projections."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Communicators of one rank; None for a group that would have this rank alone.

    Attributes:
        world: All ranks, over gloo, for host memory.
        sequence: Ranks over which the tokens of this rank's subsequences are sharded.
        replicas: Ranks of :attr:`Mesh.replica_ranks`, by kind.
        ends: First and last rank of this rank's pipeline; None unless this rank is one of the two
            and they share a parameter.
        pipeline: All ranks of this rank's pipeline, for messages of MSP shards between ranks that
            are not neighbours; None if no unit is cut.
        edges: Pairs of neighbours that include this rank, by (sender, receiver), as positions in
            the pipeline.
    """

    world: ProcessGroup | None = None
    sequence: ProcessGroup | None = None
    replicas: Mapping[ReplicaGroup, ProcessGroup | None] = field(default_factory=dict)
    ends: ProcessGroup | None = None
    pipeline: ProcessGroup | None = None
    edges: Mapping[tuple[int, int], ProcessGroup] = field(default_factory=dict)


class Mesh:
    """Grid of the running processes, with all process groups of this rank.

    The constructor makes only the group of all ranks, over which the ranks agree on a plan. The
    plan determines the groups for tensors, which :meth:`connect` makes.

    Args:
        shape: Shape of the grid; its number of ranks must be the world size.
        rank: Global rank of this process.
        timeout_s: Longest time in seconds that a member waits for the others.
        device: Device whose tensors all groups except `world` carry over NCCL; None uses the back
            end of the default group.
    """

    def __init__(
        self,
        shape: MeshShape,
        *,
        rank: int,
        timeout_s: float,
        device: torch.device | None = None,
    ) -> None:
        self.shape, self.rank, self._device = shape, rank, device
        self.at = shape.coordinates(rank)
        self._timeout = timedelta(seconds=timeout_s)
        self.groups = Groups()
        if self.is_distributed:
            world = self._group(range(shape.num_ranks), "world", backend="gloo")
            self.groups = Groups(world=world)

    def connect(self, use: CommunicatorUse, *, timeout_s: float | None = None) -> Mesh:
        """Make the groups that carry tensors, and return this mesh; every rank must call it once.

        Args:
            use: Features of the run that need communicators.
            timeout_s: Timeout in seconds of the new groups and of groups made later; None keeps
                that of the constructor. NCCL counts it from the time at which work is issued.
        """
        if timeout_s is not None:
            self._timeout = timedelta(seconds=timeout_s)
        if self.is_distributed:
            self.groups = self._make_groups(use)
        return self

    @property
    def uses_nccl(self) -> bool:
        """True if groups for tensors carry them over NCCL, between devices."""
        return self._device is not None

    def send_first_messages(self) -> None:
        """Send the :func:`first_messages` of each group of collectives; every rank must call it.

        Edges are connected by :class:`sppo.parallel.pipeline_p2p.PipelineLinks`.
        """
        groups, exchanging = self.groups, self.groups.sequence
        token = torch.zeros(self.shape.sequence_parallel, device=self._device)
        with peer_errors("sending first messages"):
            if exchanging is not None and self.shape.key_copies is None:
                dist.all_to_all_single(torch.empty_like(token), token, group=exchanging)
            for group in (exchanging, *groups.replicas.values(), groups.ends):
                if group is not None:
                    first_messages(group, device=token.device)

    @property
    def is_distributed(self) -> bool:
        """True if there is more than one rank."""
        return self.shape.num_ranks > 1

    @property
    def is_main(self) -> bool:
        """True if this is rank 0, which plots, prints and writes for all ranks."""
        return self.rank == 0

    @property
    def pipeline_ranks(self) -> tuple[int, ...]:
        """Global ranks of this rank's pipeline, first to last."""
        return self.shape.pipeline_ranks(self.at)

    @property
    def replica_ranks(self) -> dict[ReplicaGroup, tuple[int, ...]]:
        """Global ranks that hold the same parameters as this rank, by kind, in fixed order.

        There is only "stage" unless the sequence-parallel group shards weights, and "keys" only if
        it shards them over more ranks than there are key/value heads.
        """
        ranks: dict[ReplicaGroup, tuple[int, ...]] = {"stage": self.shape.stage_ranks(self.at)}
        copies = self.shape.key_copies
        if copies is not None:
            ranks["block"] = self.shape.block_ranks(self.at)
            if copies > 1:
                ranks["keys"] = self.shape.block_ranks(self.at, copies=copies)
        return ranks

    @property
    def speaks_for_replica(self) -> bool:
        """True if this rank reports values that all ranks of its replica know."""
        return self.at.pipeline == self.at.sequence == 0

    def gather_group(self, kind: ReplicaGroup) -> ProcessGroup | None:
        """Return a new communicator of the ranks with the same parameters, for weight gathers.

        Gathers overlap the reduction of gradients and all messages, so they need a communicator of
        their own. Either every rank calls this or none. None if this rank would be alone.

        Args:
            kind: Kind of the parameters.
        """
        if not self.is_distributed:
            return None
        return self._group(self.replica_ranks[kind], f"gathers of {kind}", is_limited=True)

    def _make_groups(self, use: CommunicatorUse) -> Groups:
        """Make the same number of groups on every rank, in the same order.

        Only members take part in making a group, so even with a thousand ranks each makes only a
        few. torch names a group by the number of groups that its members have made before, so a
        rank that is not a member makes a group of itself alone instead.
        """
        pipeline = self.pipeline_ranks
        here = self.at.pipeline
        ends = (pipeline[0], pipeline[-1]) if here in (0, len(pipeline) - 1) else (self.rank,)
        return Groups(
            world=self.groups.world,
            sequence=self._group(self.shape.sequence_ranks(self.at), "sequence"),
            replicas={
                kind: self._group(ranks, kind, is_limited=kind == "keys")
                for kind, ranks in self.replica_ranks.items()
            },
            ends=self._group(sorted({*ends}), "ends", is_limited=True) if use.ties_ends else None,
            pipeline=self._group(pipeline, "pipeline", is_limited=True) if use.cuts_units else None,
            edges=self._make_edges(wraps=use.wraps),
        )

    def make_range_groups(
        self, ranges: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, int], tuple[ProcessGroup, ProcessGroup]]:
        """Make two communicators for each range of pipeline positions that includes this rank.

        Every rank must call it with the same ranges, in the same order. Nothing overlaps the
        messages that are waited for at once, so these may take every multiprocessor; messages sent
        ahead overlap compute for whole layers.

        Args:
            ranges: Distinct ranges, as (first, last) position.

        Returns:
            By range, the communicator of messages that are waited for at once, and that of
            messages sent ahead.
        """
        here, found = self.at.pipeline, {}
        for first, last in ranges:
            inside = first <= here <= last
            ranks = self.pipeline_ranks[first : last + 1] if inside else (self.rank,)
            waited = self._group(ranks, f"MSP shards on {first} to {last}")
            ahead = self._group(ranks, f"weights for {first} to {last}", is_limited=True)
            if waited is not None and ahead is not None:
                found[first, last] = waited, ahead
        return found

    def _make_edges(self, *, wraps: bool) -> dict[tuple[int, int], ProcessGroup]:
        """Make one communicator for each direction of each edge at this rank.

        Of the two edges of a rank, one begins at an even position and one at an odd position, so
        edges are made in two turns; the edge from the last position to the first is a third turn.
        """
        here, size = self.at.pipeline, self.shape.pipeline_parallel
        turns = [[(i, i + 1) for i in range(size - 1) if i % 2 == parity] for parity in (0, 1)]
        if wraps:
            turns.append([(size - 1, 0)] if size > 2 else [])
        found = {}
        for turn in turns:
            mine = [edge for edge in turn if here in edge]
            for backwards in (False, True):
                sender, receiver = mine[0] if mine else (here, here)
                edge = (receiver, sender) if backwards else (sender, receiver)
                members = sorted({self.pipeline_ranks[position] for position in edge})
                group = self._group(members, f"pipeline {edge[0]} to {edge[1]}", is_limited=True)
                if group is not None:
                    found[edge] = group
        return found

    def _group(
        self,
        ranks: Sequence[int],
        purpose: str,
        *,
        backend: str | None = None,
        is_limited: bool = False,
    ) -> ProcessGroup | None:
        """Return a new communicator; None if this rank is alone.

        If its messages overlap compute or are small, they get few thread blocks, see
        :func:`_limited_options`.

        An NCCL group is bound to the device and therefore initialized at once, in the order in
        which all members make their groups, and before anything is timed. The default group must
        not be bound to a device: torch would then split every group off it, which needs all ranks
        instead of members only.
        """
        is_alone = len(ranks) == 1
        on_device = backend is None and self._device is not None and not is_alone
        with peer_errors(f"connecting to the other ranks for {purpose}"):
            group = dist.new_group(
                list(ranks),
                timeout=self._timeout,
                backend="nccl" if on_device else "gloo" if is_alone else backend,
                pg_options=_limited_options(self._timeout) if on_device and is_limited else None,
                use_local_synchronization=True,
                group_desc=purpose,
                device_id=self._device if on_device else None,
            )
        return None if is_alone else group


def first_messages(group: ProcessGroup, *, device: torch.device) -> None:
    """Send messages in a group, for which NCCL allocates the buffers of later ones.

    NCCL connects a group once for each algorithm, when a message first takes it: short sums take
    trees, broadcasts take rings, and long sums may take the switches between GPUs (NVLS).
    """
    short, long = (torch.zeros(size, device=device) for size in _FIRST_ELEMENTS)
    dist.all_reduce(short, group=group)
    dist.broadcast(short, group=group, group_src=0)
    dist.all_reduce(long, group=group)


def _limited_options(timeout: timedelta) -> Any:
    """Return NCCL options for messages that overlap compute, or are small.

    They get at most :data:`OVERLAP_MAX_CTAS` thread blocks, and with these a part of the buffers of
    other communicators. Their stream has high priority, since their blocks would otherwise wait for
    the last blocks of an attention kernel.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = OVERLAP_MAX_CTAS
    options._timeout = timeout  # torch warns unless it equals the group's timeout
    return options


def alone() -> Mesh:
    """Return the mesh of a process without peers."""
    return Mesh(MeshShape(), rank=0, timeout_s=1.0)
