"""Evaluation of a set of sequences on an engine: the same for ``sppo eval`` and for validation.

The engine runs forwards alone, on the layout of its run: weights come from its provider, resident,
gathered or streamed, and keys and values from its store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sppo.data.sample_rows import TrainingData
from sppo.engine.engine import Engine
from sppo.engine.label_losses import LabelLosses
from sppo.engine.unit import SequenceData
from sppo.planning.evaluated_rows import Row, rows_of, rows_of_replica
from sppo.schedule.actions import Action
from sppo.training.job import Job
from sppo.training.step import await_device
from sppo.training.validation.rows import row_data
from sppo.training.validation.sums import LossSums, SetLosses


@dataclass(frozen=True, slots=True, eq=False)
class RowLosses:
    """Losses of the labels of one row that this rank computed."""

    row: Row
    data: SequenceData
    """Tokens and labels of the row, on the host."""
    labels: LabelLosses


@dataclass(frozen=True, slots=True, eq=False)
class EvaluatedSet:
    """The first samples of token data, as rows with their cuts."""

    name: str
    samples: TrainingData
    num_samples: int
    """Number of samples that are evaluated."""
    length: int
    """Most tokens of a sample."""
    are_documents: bool
    """Whether samples are documents rather than sequences of a stream."""
    rows: tuple[Row, ...]
    at_once: int = 1
    """Rows of a replica that run together, to fill a pipeline."""

    @classmethod
    def of(
        cls,
        samples: TrainingData,
        *,
        boundaries: tuple[int, ...],
        packs: bool,
        most: int | None = None,
        degree: int = 1,
        name: str = "held_out",
        at_once: int = 1,
    ) -> EvaluatedSet:
        """Return a set of samples.

        Args:
            samples: Samples, or sequences of the stream.
            boundaries: Boundaries of the subsequences of a sequence of full length.
            packs: Whether samples are documents, packed side by side.
            most: Largest number of samples, from the first on; None for all.
            degree: Ranks over which the tokens of a subsequence are sharded.
            name: Name of the set.
            at_once: Rows of a replica that run together.
        """
        count = samples.num_samples if most is None else min(most, samples.num_samples)
        lengths = samples.lengths(range(count))
        rows = rows_of(lengths, boundaries=boundaries, packs=packs, degree=degree)
        return cls(name, samples, count, boundaries[-1], packs, tuple(rows), at_once)


def evaluate_set(
    job: Job,
    engine: Engine,
    own: EvaluatedSet,
    *,
    round_s: float = 0.0,
    before_round: Callable[[], object] = lambda: None,
    before_action: Callable[[int, Action], None] | None = None,
    on_samples: Callable[[int], None] = lambda done: None,
    on_round: Callable[[Sequence[Row], Sequence[RowLosses]], None] = lambda rows, losses: None,
) -> SetLosses:
    """Return the losses of a set. Collective: all ranks of the job call it with the same set.

    Args:
        job: Job of the run, whose replicas share the rows.
        engine: Engine of this rank.
        own: Set to evaluate.
        round_s: Predicted seconds of the rows that run together, for the timeout of a device.
        before_round: Called before rows run; an error that it raises leaves the engine usable.
        before_action: Called before each action; an error that it raises closes the engine.
        on_samples: Called with the number of samples done, of all replicas.
        on_round: Called with the rows of all replicas that have run together, in order, and with
            the losses of those of this replica.

    Raises:
        PeerLostError: Another rank ended or does not answer.
    """
    shape, device = job.mesh.shape, job.device
    replicas = shape.data_parallel
    mine = rows_of_replica(
        own.rows, replica=job.mesh.at.data, replicas=replicas, degree=shape.sequence_parallel
    )
    sums = LossSums(length=own.length, num_samples=own.num_samples)
    for first in range(0, len(mine), own.at_once):
        before_round()
        rows = mine[first : first + own.at_once]
        data = [row_data(own.samples, row) for row in rows]
        result = engine.evaluate_together(
            [device.put(sequence) for sequence in data],
            [row.boundaries for row in rows],
            before_action=before_action,
            on_failure=job.progress.failed,
        )
        what = f"evaluating {own.name}"
        await_device(job, result.executed, what=what, predicted_s=round_s)
        found = [*map(RowLosses, rows, data, result.losses)]
        for one in found:
            sums.add(own.samples, one.row, one.data, one.labels)
        ended = (first + own.at_once) * replicas
        on_round(own.rows[first * replicas : ended], found)
        on_samples(_num_samples(own.rows[:ended]))
    return sums.over_ranks(job.peers)


def _num_samples(rows: Sequence[Row]) -> int:
    return sum(len(row.samples) for row in rows)
