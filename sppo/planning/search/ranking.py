"""Order of candidates: by step time, then by simplicity."""

from __future__ import annotations

from sppo.planning.search.evaluated_candidate import EvaluatedCandidate

Rank = tuple[float, int, int, int, int]
"""Sort key of :func:`rank_of`."""


def rank_of(evaluated: EvaluatedCandidate) -> Rank:
    """Return the sort key of a candidate: step time, then devices, ranks, stages, subsequences."""
    degrees = evaluated.degrees
    return (
        rounded(evaluated.step_s),
        degrees.num_devices,
        degrees.pipeline_parallel,
        evaluated.candidate.virtual_stages,
        len(evaluated.candidate.lengths),
    )


def rounded(seconds: float) -> float:
    """Return seconds with nine digits, which sums of equal terms in any order have in common."""
    return float(f"{seconds:.9g}")
