"""Tokens, labels and loss of each source of a mixture in a step.

The losses are those of the labels that the step computed anyway: no further pass is made.
"""

from __future__ import annotations

import math

import numpy as np

from sppo.data.sample_rows import TrainingData
from sppo.engine.engine import StepResult
from sppo.report.metrics import SourceMetrics
from sppo.training.job import Job
from sppo.training.step import StepWork


def by_source(
    work: StepWork, result: StepResult, data: TrainingData, job: Job
) -> dict[str, SourceMetrics] | None:
    """Return the figures of each source of a run, of all replicas. Collective.

    Returns None for a run without ``data.sources``.

    Args:
        work: Work of the step.
        result: Losses of the labels that this rank computed.
        data: Training data of the run.
        job: Job of this rank.
    """
    names = job.run.data.sources
    if names is None:
        return None
    tokens, labels, losses = np.zeros((3, len(names)))
    for samples, own in zip(work.own, result.losses, strict=True):
        lengths = data.lengths(samples)
        sources = np.array([data.table.source_of(sample) for sample in samples])
        np.add.at(tokens, sources, np.array(lengths) * job.mesh.speaks_for_replica)
        sums = own.by_sample(lengths)
        np.add.at(labels, sources, sums.labels_G)
        np.add.at(losses, sources, sums.losses_G)
    told = np.array(job.peers.total([*tokens, *labels, *losses])).reshape(3, -1)
    return {
        name: SourceMetrics(int(of_tokens), int(count), loss / count if count else math.nan)
        for name, of_tokens, count, loss in zip(names, *told.tolist(), strict=True)
    }
