"""Scores of documents: log-probabilities of their labels, one document after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sppo.data.sample_rows import TrainingData
from sppo.parallel.host_collectives import HostCollectives
from sppo.planning.evaluated_rows import Row
from sppo.training.evaluation.evaluated_run import ready_evaluation
from sppo.training.job import Job
from sppo.training.validation.evaluate import RowLosses, evaluate_set

Columns = NDArray[np.float64]
"""[labels, 4] Document of each label, its position there, its loss, and 1 if it is predicted."""


@dataclass(frozen=True, slots=True, eq=False)
class DocumentScore:
    """Log-probabilities of the labels of one document that count, L of them."""

    document: int
    """Number of the document in the token data."""
    positions_L: NDArray[np.int64]
    """Position of each label in the document, ascending."""
    log_probabilities_L: NDArray[np.float64]
    """Log-probability of each label in nats, given all tokens before it."""
    correct_L: NDArray[np.bool_]
    """Whether each label is the most likely token."""

    @property
    def is_exact(self) -> bool | None:
        """True if greedy decoding gives all labels; None without labels."""
        return bool(self.correct_L.all()) if len(self.correct_L) else None


def score(
    job: Job,
    source: Path | None,
    *,
    on_document: Callable[[DocumentScore], None],
    on_done: Callable[[int, int], None],
) -> None:
    """Score every document of the tokens that a run is evaluated on. Collective.

    Args:
        job: Job of a run of whole documents that passed
            :func:`sppo.training.input_checks.check_evaluation`.
        source: As in :func:`.evaluated_run.ready_evaluation`.
        on_document: Called on rank 0 with the score of each document, in order.
        on_done: Called with the number of documents with labels done, and of all.

    Raises:
        ValueError: There is no checkpoint, or data or weights cannot be used.
        MemoryError: The scoring does not fit.
    """
    with ready_evaluation(job, source) as ready:
        samples, count = ready.whole.samples, ready.whole.plan.num_samples
        documents = _Documents(ready.data.document_offsets, samples, job.peers, on_document)
        evaluate_set(
            job,
            ready.engine,
            ready.whole,
            on_samples=lambda done: on_done(done, count),
            on_round=documents.add,
        )
        documents.add_up_to(ready.data.num_documents)


class _Documents:
    """Documents in order: what the ranks have of each round is put together on rank 0.

    Args:
        offsets: [documents + 1] Starts of the documents in the token data.
        samples: Samples, each of which is a whole document. A document of a single token has none.
        peers: Collectives over all ranks.
        on_document: Called on rank 0 with the score of each document.
    """

    def __init__(
        self,
        offsets: NDArray[np.int64],
        samples: TrainingData,
        peers: HostCollectives,
        on_document: Callable[[DocumentScore], None],
    ) -> None:
        starts = np.asarray(samples.table.starts)
        self._of_samples = np.searchsorted(offsets, starts, side="right") - 1
        self._peers, self._on_document, self._next = peers, on_document, 0

    def add(self, rows: Sequence[Row], losses: Sequence[RowLosses]) -> None:
        """Add the documents of a round. Collective.

        Args:
            rows: Rows of all replicas.
            losses: Losses that this rank has of its replica's rows.
        """
        told = self._peers.told_to_main(lambda: np.concatenate([*map(self._columns, losses)]))
        if not told:
            return
        of_round = np.concatenate(told)
        of_round = of_round[np.lexsort((of_round[:, 1], of_round[:, 0]))]
        for sample in (sample for row in rows for sample in row.samples):
            document = int(self._of_samples[sample])
            self.add_up_to(document)
            first, end = np.searchsorted(of_round[:, 0], (document, document + 1))
            self._add(of_round[first:end])

    def add_up_to(self, document: int) -> None:
        """Add the documents before one that have a single token, and so no label."""
        while self._peers.rank == 0 and self._next < document:
            self._add(np.empty((0, 4)))

    def _add(self, columns: Columns) -> None:
        _, positions, losses, correct = columns.T
        self._on_document(
            DocumentScore(self._next, positions.astype(np.int64), -losses, correct.astype(np.bool_))
        )
        self._next += 1

    def _columns(self, losses: RowLosses) -> Columns:
        """Return the labels of a row that this rank has."""
        if not losses.row.samples:
            return np.empty((0, 4))
        found, starts = losses.labels, np.asarray(losses.data.document_starts)
        predicting = found.positions_L.numpy()
        places = found.documents(losses.data.document_starts)
        own = self._of_samples[np.asarray(losses.row.samples)[places]]
        values = (found.losses_L.double().cpu().numpy(), found.correct_L.cpu().numpy())
        return np.stack([own, predicting - starts[places] + 1, *values], axis=1)
