"""Shape of the grid of data, pipeline and sequence parallelism, and its ranks; without torch.

Sequence-parallel ranks are numbered consecutively, because they communicate most, then pipeline
ranks, then replicas: ``rank = (data * P + pipeline) * G + sequence``.
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
