"""Process groups of the grid of ranks: who talks with whom, over what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from sppo.parallel.mesh_shape import MeshShape

HURRIED_CTAS = 8
"""Thread blocks that a message may take which travels while its ranks compute. Its stream has high
priority, or its blocks would wait for the last ones of a kernel of attention; and a message that
waits for its other end holds the multiprocessors of its blocks, of 132 on an H100."""
Holders = Literal["stage", "keys", "block"]
"""Ranks with the same values of a parameter, as groups of :class:`Groups`."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The communicators of one rank; None where it would be alone in one.

    Attributes:
        world: all ranks, over gloo: for what is not on a device.
        sequence: the ranks over which the tokens of this rank's subsequences are sharded.
        stage: the ranks that hold this rank's layers.
        block: of those, where a sequence group shards weights, the ranks that hold the same
            part as this one.
        keys: the same of the key/value heads, where there are fewer than ranks.
        ends: the first and the last rank of this rank's pipeline, if it is one of them, and they
            share a parameter.
        pipeline: all ranks of this rank's pipeline: for messages between those that are no
            neighbours, which only MSP shards send; None where no unit is cut.
        edges: by (sender, receiver), positions in the pipeline; those that this rank is an end of.
    """

    world: ProcessGroup | None = None
    sequence: ProcessGroup | None = None
    stage: ProcessGroup | None = None
    block: ProcessGroup | None = None
    keys: ProcessGroup | None = None
    ends: ProcessGroup | None = None
    pipeline: ProcessGroup | None = None
    edges: Mapping[tuple[int, int], ProcessGroup] = field(default_factory=dict)


class Mesh:
    """The grid of the processes that run now, and every group of them that communicates.

    At first there is only the group of all ranks, which agree over it on what they will do. That
    says which groups for tensors there must be: :meth:`connect` makes them.

    Args:
        shape: of the grid; its number of ranks is the world's.
        rank: this process.
        timeout_s: how long a member waits for the others.
        device: whose tensors all groups but `world` carry, over NCCL; None: over the backend of
            the default group.
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

    def connect(
        self,
        *,
        timeout_s: float | None = None,
        wraps: bool = False,
        cuts_units: bool = False,
        ties_ends: bool = False,
    ) -> Mesh:
        """Make the groups that carry tensors, and return this mesh; every rank calls it, once.

        Args:
            timeout_s: how long what a member asks of them may take from then on; None: as long as
                it waits for others. Over NCCL that counts from the time at which work is issued.
            wraps: ranks hold several stages, so the last one of a pipeline sends to the first.
            cuts_units: ranks of a pipeline that are no neighbours send each other MSP shards.
            ties_ends: the first and the last rank of a pipeline share a parameter.
        """
        if timeout_s is not None:
            self._timeout = timedelta(seconds=timeout_s)
        if self.is_distributed:
            self.groups = self._make_groups(wraps=wraps, cuts_units=cuts_units, ties_ends=ties_ends)
        return self

    @property
    def is_distributed(self) -> bool:
        """Return whether there is more than one rank."""
        return self.shape.num_ranks > 1

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0, which draws, prints and writes for all."""
        return self.rank == 0

    @property
    def pipeline_ranks(self) -> tuple[int, ...]:
        """Global ranks of this rank's pipeline, first to last."""
        return self.shape.pipeline_ranks(self.at)

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """Global ranks that hold this rank's layers."""
        return self.shape.stage_ranks(self.at)

    @property
    def speaks_for_replica(self) -> bool:
        """Return whether this rank tells what all ranks of its replica know."""
        return self.at.pipeline == self.at.sequence == 0

    def gather_group(self, holders: Holders) -> ProcessGroup | None:
        """Make one more communicator of the ranks with the same parameters, for gathering weights.

        Gathers are under way while gradients are added up and messages of all kinds travel, so they
        have a communicator with none of them. Every rank makes it, or none; None where this rank
        would be alone in it.

        Args:
            holders: the group of :class:`Groups` that has the same ranks.
        """
        if not self.is_distributed:
            return None
        ranks = {
            "stage": self.stage_ranks,
            "block": self.shape.block_ranks(self.at),
            "keys": self.shape.block_ranks(self.at, copies=self.shape.key_copies or 1),
        }
        return self._group(ranks[holders], f"gathers of {holders}", hurried=True)

    def _make_groups(self, *, wraps: bool, cuts_units: bool, ties_ends: bool) -> Groups:
        """Make as many groups on every rank, in the same order.

        Only members take part in making one, so a thousand ranks make a handful each. torch names
        a group after the number of groups its members have made before: a rank that has no part in
        one makes one of its own.
        """
        pipeline = self.pipeline_ranks
        here = self.at.pipeline
        ends = (pipeline[0], pipeline[-1]) if here in (0, len(pipeline) - 1) else (self.rank,)
        copies = self.shape.key_copies or 0
        return Groups(
            world=self.groups.world,
            sequence=self._group(self.shape.sequence_ranks(self.at), "sequence"),
            stage=self._group(self.stage_ranks, "stage"),
            block=self._block_group("block", copies=1) if copies else None,
            keys=self._block_group("keys", copies=copies) if copies > 1 else None,
            ends=self._group(sorted({*ends}), "ends") if ties_ends else None,
            pipeline=self._group(pipeline, "pipeline") if cuts_units else None,
            edges=self._make_edges(wraps=wraps),
        )

    def _block_group(self, purpose: str, *, copies: int) -> ProcessGroup | None:
        return self._group(self.shape.block_ranks(self.at, copies=copies), purpose)

    def make_range_groups(
        self, ranges: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, int], tuple[ProcessGroup, ProcessGroup]]:
        """Make two communicators for each range of pipeline positions that this rank is in.

        Every rank must call it with the same ranges, in the same order.

        Args:
            ranges: (first, last) position of each, different ones.
        """
        here, found = self.at.pipeline, {}
        for first, last in ranges:
            inside = first <= here <= last
            ranks = self.pipeline_ranks[first : last + 1] if inside else (self.rank,)
            waited = self._group(ranks, f"MSP shards on {first} to {last}", hurried=True)
            ahead = self._group(ranks, f"weights for {first} to {last}")
            if waited is not None and ahead is not None:
                found[first, last] = waited, ahead
        return found

    def _make_edges(self, *, wraps: bool) -> dict[tuple[int, int], ProcessGroup]:
        """Make one communicator for each direction of each edge at this rank.

        Of the edges at a rank one begins at an even position and one at an odd one, so they are
        made in two turns; the edge from the last position to the first has a turn of its own.
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
                group = self._group(members, f"pipeline {edge[0]} to {edge[1]}", hurried=True)
                if group is not None:
                    found[edge] = group
        return found

    def _group(
        self,
        ranks: Sequence[int],
        purpose: str,
        *,
        backend: str | None = None,
        hurried: bool = False,
    ) -> ProcessGroup | None:
        """A communicator of its own for one purpose; see :data:`HURRIED_CTAS` for `hurried`.

        Over NCCL it is made here and now, for it is bound to the device: in the order in which all
        members make their groups, and before anything is timed. The default group is bound to none,
        or torch would split every group off from it, which takes all ranks and not only members.
        """
        is_alone = len(ranks) == 1
        on_device = backend is None and self._device is not None and not is_alone
        group = dist.new_group(
            list(ranks),
            timeout=self._timeout,
            backend="nccl" if on_device else "gloo" if is_alone else backend,
            pg_options=_hurried_options(self._timeout) if on_device and hurried else None,
            use_local_synchronization=True,
            group_desc=purpose,
            device_id=self._device if on_device else None,
        )
        return None if is_alone else group


def _hurried_options(timeout: timedelta) -> Any:
    """Return options of NCCL for messages that travel while their ranks compute."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = HURRIED_CTAS
    options._timeout = timeout  # torch warns of one that differs from the group's
    return options


def alone() -> Mesh:
    """The mesh of a process that has no peers."""
    return Mesh(MeshShape(), rank=0, timeout_s=1.0)
