"""The grid of ranks of data, pipeline and sequence parallelism: who is where; loads no torch.

Ranks are numbered with the sequence-parallel devices next to each other, for they talk most, then
the pipeline stages, then the replicas: ``rank = (data * P + pipeline) * G + sequence``.
"""

from __future__ import annotations

from dataclasses import dataclass

from sppo.config.run import ParallelConfig


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Position of a rank in the grid."""

    data: int
    pipeline: int
    sequence: int


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Degrees of parallelism, and the arithmetic of ranks."""

    data_parallel: int = 1
    pipeline_parallel: int = 1
    sequence_parallel: int = 1
    key_copies: int | None = None
    """Ranks of a sequence group that hold the same key/value heads, where its ranks shard weights
    out (Megatron); None where each holds them all (Ulysses)."""

    @classmethod
    def of(cls, parallel: ParallelConfig, *, key_copies: int | None = None) -> MeshShape:
        """Return the grid that a run file asks for."""
        return cls(
            parallel.data_parallel_degree,
            parallel.pipeline_parallel_degree,
            parallel.sequence_parallel_degree,
            key_copies,
        )

    @property
    def num_ranks(self) -> int:
        """Processes in all."""
        return self.data_parallel * self.pipeline_parallel * self.sequence_parallel

    def check(self, world_size: int) -> None:
        """Refuse a world that is not this grid.

        Raises:
            ValueError: the degrees do not multiply to the number of ranks there are.
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
        """The global rank at some coordinates."""
        row = at.data * self.pipeline_parallel + at.pipeline
        return row * self.sequence_parallel + at.sequence

    def pipeline_ranks(self, at: Coordinates) -> tuple[int, ...]:
        """The ranks that a sequence passes through from a rank's point of view."""
        return tuple(
            self.rank_of(Coordinates(at.data, stage, at.sequence))
            for stage in range(self.pipeline_parallel)
        )

    def sequence_ranks(self, at: Coordinates) -> tuple[int, ...]:
        """The ranks over which the tokens of each subsequence are sharded."""
        return tuple(
            self.rank_of(Coordinates(at.data, at.pipeline, index))
            for index in range(self.sequence_parallel)
        )

    def stage_ranks(self, at: Coordinates) -> tuple[int, ...]:
        """Return all ranks of the same pipeline rank, which hold the same layers."""
        return tuple(
            rank for rank in range(self.num_ranks) if self.coordinates(rank).pipeline == at.pipeline
        )

    def block_ranks(self, at: Coordinates, *, copies: int = 1) -> tuple[int, ...]:
        """Return the ranks of a stage that hold the same part of sharded weights.

        Args:
            at: coordinates of one of them.
            copies: ranks of a sequence group, next to each other, that hold the same.
        """
        return tuple(
            rank
            for rank in self.stage_ranks(at)
            if self.coordinates(rank).sequence // copies == at.sequence // copies
        )
