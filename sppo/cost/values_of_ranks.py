"""Values of pipeline ranks, from the values of the stages that each rank holds."""

from __future__ import annotations

import numpy as np

from sppo.cost.candidate import Candidate
from sppo.schedule.actions import RESIDENT_STAGES
from sppo.schedule.costs import Table


def of_ranks(candidate: Candidate, of_stages: Table) -> Table:
    """Return the sum of values over the stages of each pipeline rank, [ranks, ...].

    Args:
        candidate: Candidate that the stages belong to.
        of_stages: Value of each stage, [stages, ...].
    """
    sums: Table = _by_rank(candidate, of_stages).sum(axis=0)
    return sums


def most_of_ranks(candidate: Candidate, of_stages: Table) -> Table:
    """Return the maximum of values over the stages of each pipeline rank, [ranks, ...].

    Args:
        candidate: Candidate that the stages belong to.
        of_stages: Value of each stage, [stages, ...].
    """
    most: Table = _by_rank(candidate, of_stages).max(axis=0)
    return most


def most_held_of_ranks(candidate: Candidate, of_stages: Table, *, consecutive: bool) -> Table:
    """Return the largest sum of values over stages that are on a rank's device at once, [ranks].

    `RESIDENT_STAGES` stages are on the device at once: see
    :mod:`sppo.schedule.transfers.copies`.

    Args:
        candidate: Candidate that the stages belong to.
        of_stages: Value of each stage, [stages].
        consecutive: Whether the stages on the device are consecutive ones of the rank; otherwise
            they may be any.
    """
    by_rank = _by_rank(candidate, of_stages)
    count = min(RESIDENT_STAGES, len(by_rank))
    if not consecutive:
        largest: Table = np.sort(by_rank, axis=0)[-count:].sum(axis=0)
        return largest
    windows = [by_rank[first : len(by_rank) - count + first + 1] for first in range(count)]
    most: Table = np.sum(windows, axis=0).max(axis=0)
    return most


def _by_rank(candidate: Candidate, of_stages: Table) -> Table:
    """Return a view of [stages, ...] as [virtual stages, ranks, ...]."""
    return of_stages.reshape(-1, candidate.pipeline_parallel_degree, *of_stages.shape[1:])
