"""Evaluation of a set of sequences on an engine: the same for ``sppo eval`` and for validation.

The engine runs forwards alone, on the layout of its run: weights come from its provider, resident,
gathered or streamed, and keys and values from its store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sppo.config import RunConfig
from sppo.data.sample_rows import TrainingData
from sppo.engine.engine import Engine
from sppo.engine.label_losses import LabelLosses
from sppo.engine.unit import SequenceData
from sppo.kernels.labels import IGNORED_LABEL
from sppo.planning.evaluated_rows import Row, rows_of, rows_of_replica
from sppo.planning.validation_plan import SetPlan
from sppo.schedule.actions import Action
from sppo.training.job import Job
from sppo.training.step import await_device
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

    samples: TrainingData
    plan: SetPlan
    are_documents: bool
    """Whether samples are documents rather than sequences of a stream."""
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, run: RunConfig, samples: TrainingData, plan: SetPlan) -> EvaluatedSet:
        """Return a set of samples.

        Args:
            run: Run of the set, which says what its samples are, with the degrees of the job.
            samples: Samples, or sequences of the stream.
            plan: Plan of the evaluation of the first ones.
        """
        packs = run.data.samples == "documents"
        rows = rows_of(
            samples.lengths(range(plan.num_samples)),
            boundaries=plan.boundaries,
            packs=packs,
            degree=run.parallel.sequence_parallel_degree,
        )
        return cls(samples, plan, packs, tuple(rows))


def evaluate_set(
    job: Job,
    engine: Engine,
    own: EvaluatedSet,
    *,
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
        before_round: Called before rows run; an error that it raises leaves the engine usable.
        before_action: Called before each action; an error that it raises closes the engine.
        on_samples: Called with the number of samples done, of all replicas.
        on_round: Called with the rows of all replicas that have run together, in order, and with
            the losses of those of this replica.

    Raises:
        PeerLostError: Another rank ended or does not answer.
    """
    shape, device, plan = job.mesh.shape, job.device, own.plan
    replicas = shape.data_parallel
    mine = rows_of_replica(
        own.rows, replica=job.mesh.at.data, replicas=replicas, degree=shape.sequence_parallel
    )
    sums = LossSums(length=plan.boundaries[-1], num_samples=plan.num_samples)
    for first in range(0, len(mine), plan.at_once):
        before_round()
        rows = mine[first : first + plan.at_once]
        data = [_row_data(own.samples, row) for row in rows]
        result = engine.evaluate_together(
            [device.put(sequence) for sequence in data],
            [row.boundaries for row in rows],
            before_action=before_action,
            on_failure=job.progress.failed,
        )
        what = f"evaluating {plan.name}"
        await_device(job, result.executed, what=what, predicted_s=plan.round_s)
        found = [*map(RowLosses, rows, data, result.losses)]
        for one in found:
            sums.add(own.samples, one.row, one.data, one.labels)
        ended = (first + plan.at_once) * replicas
        on_round(own.rows[first * replicas : ended], found)
        on_samples(_num_samples(own.rows[:ended]))
    return sums.over_ranks(job.peers)


def _num_samples(rows: Sequence[Row]) -> int:
    return sum(len(row.samples) for row in rows)


def _row_data(samples: TrainingData, row: Row) -> SequenceData:
    """Return tokens and labels of a row; what its samples do not fill has no labels."""
    length = row.boundaries[-1]
    data = samples.row(row.samples) if row.samples else _nothing()
    filled = len(data.tokens_S)
    if filled == length:
        return data
    padding = torch.zeros(length - filled, dtype=data.tokens_S.dtype)
    return SequenceData(
        torch.cat([data.tokens_S, padding]),
        torch.cat([data.labels_S, torch.full_like(padding, IGNORED_LABEL)]),
        tuple(dict.fromkeys((*data.document_starts, filled))),
    )


def _nothing() -> SequenceData:
    nothing = torch.empty(0, dtype=torch.int64)
    return SequenceData(nothing, nothing, ())
