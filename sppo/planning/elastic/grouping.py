"""Grouping: the sequences of a step in several pipelines, one after another.

Where memory does not allow one pipeline for all, or what it recomputes takes longer than another
pipeline needs to fill and to drain, (p - 1) chunks, sequences with like numbers of subsequences
form pipelines of their own, whose gradients are accumulated (InfiniPipe, sequence grouping). A long
sequence holds many units and their K and V; short ones beside it then hold none at that time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby, pairwise

import numpy as np

from sppo.cost.candidate import Candidate
from sppo.cost.stage_cost import stage_seconds
from sppo.planning.elastic.levels import fastest_levels
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate, assess
from sppo.planning.search.simulated_candidate import simulate_candidate

PipelineSeconds = Callable[[range], float | None]
"""Sequences, by their places -> seconds of a pipeline of them; None where it does not fit."""
_MOST_KINDS = 5
"""Numbers of subsequences of which pipelines of their own are tried, the largest ones."""


def best_pipelines(counts: Sequence[int], *, seconds: PipelineSeconds) -> tuple[int, ...] | None:
    """Return how many sequences each pipeline has; None where nothing fits.

    Sequences with the same number of subsequences are never parted: their pipeline holds no more
    than that of two of them. By dynamic programming over these numbers: best[j] = min over i < j of
    best[i] + seconds(sequences between i and j).

    Args:
        counts: subsequences of each sequence, descending.
        seconds: of pipelines, with filling and draining them.
    """
    firsts = _firsts_of_kinds(counts)
    best: list[float | None] = [0.0] + [None] * (len(firsts) - 1)
    cuts = [0] * len(firsts)
    for end in range(1, len(firsts)):
        for begin in range(end):
            before = best[begin]
            if before is None:
                continue
            own = seconds(range(firsts[begin], firsts[end]))
            now = best[end]
            if own is not None and (now is None or before + own < now):
                best[end], cuts[end] = before + own, begin
    if best[-1] is None:
        return None
    places = [len(firsts) - 1]
    while places[-1]:
        places.append(cuts[places[-1]])
    return tuple(firsts[end] - firsts[begin] for begin, end in pairwise(reversed(places)))


def _firsts_of_kinds(counts: Sequence[int]) -> list[int]:
    """Places of the first sequence of each number of subsequences, and one past the last one."""
    firsts, place = [], 0
    for _, alike in groupby(counts):
        firsts.append(place)
        place += len(list(alike))
    return [*firsts[:_MOST_KINDS], place]


def grouped(candidate: Candidate, *, alone: EvaluatedCandidate | None) -> EvaluatedCandidate | None:
    """Return the candidate in several pipelines, simulated; None where that cannot be better.

    Args:
        candidate: with packed sequences, those of most subsequences first.
        alone: the best with one pipeline; None where that does not fit.
    """
    counts = [len(sequence.lengths) for sequence in candidate.packed]
    if candidate.pipeline_parallel_degree == 1 or counts[0] == counts[-1]:
        return None
    if alone is not None and _recomputing_s(alone) <= _flush_s(candidate):
        return None
    pipelines = best_pipelines(counts, seconds=lambda own: _pipeline_s(candidate, own))
    if pipelines is None or len(pipelines) == 1:
        return None
    return fastest_levels(candidate.with_packed(candidate.packed, pipelines=pipelines))


def _recomputing_s(evaluated: EvaluatedCandidate) -> float:
    """Return how much longer its step takes than if everything were retained."""
    retaining = assess(replace(evaluated.candidate, policy="retain"))
    return evaluated.step_s - simulate_candidate(retaining).step_s


def _flush_s(candidate: Candidate) -> float:
    """Return the seconds to fill and drain a pipeline: (p - 1) subsequences on one rank."""
    units = stage_seconds(candidate).units
    of_ranks = candidate.virtual_stages * (units.forward + units.backward + units.weight)
    return (candidate.pipeline_parallel_degree - 1) * float(np.mean(of_ranks))


def _pipeline_s(candidate: Candidate, own: range) -> float | None:
    """Return the seconds of a pipeline of some sequences; None where it does not fit."""
    found = fastest_levels(candidate.with_packed(candidate.packed[own.start : own.stop]))
    if found is None:
        return None
    return found.step_s - float(found.costs.reduce_s.max())
