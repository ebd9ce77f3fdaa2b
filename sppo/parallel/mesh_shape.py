"""Shape of the grid of data, pipeline and sequence parallelism, and its ranks; without torch.

Sequence-parallel ranks are numbered consecutively, because they communicate most, then pipeline
ranks, then replicas: ``rank = (data * P + pipeline) * G + sequence``. A rank has a CUDA stream for
each communicator.
"""

from __future__ import annotations

from dataclasses import dataclass

from sppo.config.run import ParallelConfig
from sppo.cost.communicators import CommunicatorUse, count_communicators

POOL_STREAMS = 32
"""Streams of torch's pool of each priority, which are reused in turn. Two NCCL communicators on one
stream would wait for each other's messages, which may deadlock if ranks issue messages in different
orders; copies would wait for messages, too. Communicators with a limited number of thread blocks
have high priority."""
_COPIES = 2
"""Streams of a lane, which copies tensors to another tier and back."""


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Position of a rank in the grid."""

    data: int
    pipeline: int
    sequence: int


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Degrees of parallelism, and the mapping between ranks and coordinates."""

    data_parallel: int = 1
    pipeline_parallel: int = 1
    sequence_parallel: int = 1
    key_copies: int | None = None
    """Number of ranks of a sequence-parallel group that hold the same key/value heads, if the group
    shards weights (Megatron); None if every rank holds whole weights (Ulysses)."""

    @classmethod
    def of(cls, parallel: ParallelConfig, *, key_copies: int | None = None) -> MeshShape:
        """Return the grid that the `parallel` section of a run file specifies."""
        return cls(
            parallel.data_parallel_degree,
            parallel.pipeline_parallel_degree,
            parallel.sequence_parallel_degree,
            key_copies,
        )

    @property
    def num_ranks(self) -> int:
        """Total number of ranks."""
        return self.data_parallel * self.pipeline_parallel * self.sequence_parallel

    def __str__(self) -> str:
        """Return the degrees of parallelism above 1 as text, e.g. ``pipeline 2, sequence 4``."""
        degrees = (
            ("data", self.data_parallel),
            ("pipeline", self.pipeline_parallel),
            ("sequence", self.sequence_parallel),
        )
        return ", ".join(f"{name} {degree}" for name, degree in degrees if degree > 1)

    def check(self, world_size: int) -> None:
        """Raise ValueError unless the grid has ``world_size`` ranks.

        Raises:
            ValueError: The product of the degrees differs from ``world_size``.
        """
        if self.num_ranks != world_size:
            raise ValueError(
                f"parallel: data {self.data_parallel} x pipeline {self.pipeline_parallel} x "
                f"sequence {self.sequence_parallel} makes {self.num_ranks} "
                f"rank{'' if self.num_ranks == 1 else 's'}, and {world_size} were started: start "
                f"{self.num_ranks}, or change the degrees"
            )

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a global rank."""
        rest, sequence = divmod(rank, self.sequence_parallel)
        data, pipeline = divmod(rest, self.pipeline_parallel)
        return Coordinates(data, pipeline, sequence)

    def rank_of(self, at: Coordinates) -> int:
        """Return the global rank at the given coordinates."""
        row = at.data * self.pipeline_parallel + at.pipeline
        return row * self.sequence_parallel + at.sequence

    def pipeline_ranks(self, at: Coordinates) -> tuple[int, ...]:
        """Return the global ranks of the pipeline that includes ``at``, first to last."""
        return tuple(
            self.rank_of(Coordinates(at.data, stage, at.sequence))
            for stage in range(self.pipeline_parallel)
        )

    def sequence_ranks(self, at: Coordinates) -> tuple[int, ...]:
        """Return the global ranks of the sequence-parallel group that includes ``at``."""
        return tuple(
            self.rank_of(Coordinates(at.data, at.pipeline, index))
            for index in range(self.sequence_parallel)
        )

    def stage_ranks(self, at: Coordinates) -> tuple[int, ...]:
        """Return all global ranks with the same pipeline coordinate: they hold the same layers."""
        return tuple(
            rank for rank in range(self.num_ranks) if self.coordinates(rank).pipeline == at.pipeline
        )

    def block_ranks(self, at: Coordinates, *, copies: int = 1) -> tuple[int, ...]:
        """Return the global ranks of a stage that hold the same shard of the weights.

        Args:
            at: Coordinates of one of these ranks.
            copies: Number of consecutive ranks of a sequence-parallel group with the same shard.
        """
        return tuple(
            rank
            for rank in self.stage_ranks(at)
            if self.coordinates(rank).sequence // copies == at.sequence // copies
        )


def count_streams(
    shape: MeshShape, at: Coordinates, use: CommunicatorUse, *, num_lanes: int = 0
) -> tuple[int, int]:
    """Return the streams of normal and of high priority of the rank at ``at``.

    There is one per communicator and copy stream.
    """
    full, limited = count_communicators(
        use,
        replicas=shape.data_parallel,
        pipeline_ranks=shape.pipeline_parallel,
        width=shape.sequence_parallel,
        key_copies=shape.key_copies,
        position=at.pipeline,
    )
    return full + _COPIES * num_lanes, limited


def check_streams(shape: MeshShape, use: CommunicatorUse, *, num_lanes: int = 0) -> None:
    """Raise ValueError if a rank needs more streams than torch has.

    Args:
        shape: Shape of the grid of ranks.
        use: Features of the run that need communicators.
        num_lanes: Number of lanes to other tiers: for offloaded tensors, and for training state.

    Raises:
        ValueError: A rank needs more streams of one priority than a pool has.
    """
    most = max(
        max(count_streams(shape, shape.coordinates(rank), use, num_lanes=num_lanes))
        for rank in range(shape.num_ranks)
    )
    if most > POOL_STREAMS:
        raise ValueError(
            f"a rank of {shape.pipeline_parallel} pipeline ranks would use {most} CUDA streams of "
            f"one priority, and torch has {POOL_STREAMS}: with parallel.multiplexed=on every range "
            "of ranks that shares units takes one of each; write parallel.multiplexed=off, or use "
            "fewer pipeline ranks"
        )
