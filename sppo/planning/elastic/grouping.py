"""Grouping: the sequences of a step in several pipelines, one after another.

Where memory does not allow one pipeline for all, or what it recomputes takes longer than another
pipeline needs to fill and to drain, (p - 1) chunks, sequences with like numbers of subsequences
form pipelines of their own, whose gradients are accumulated (InfiniPipe, sequence grouping). A long
sequence holds many units and their K and V; short ones beside it then hold none at that time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from sppo.activations.placement import ActivationPlacement
from sppo.cost.candidate import Candidate
from sppo.cost.stage_cost import of_ranks, stage_seconds
from sppo.planning.elastic.levels import fastest_levels
from sppo.planning.elastic.pipeline_bounds import PipelineBounds
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate, assess_placement
from sppo.planning.search.simulated_candidate import simulate_candidate

PipelineSeconds = Callable[[range], float | None]
"""Sequences, by their places -> seconds of a pipeline of them; None where it does not fit."""
_MOST_KINDS = 5
"""Numbers of subsequences of which pipelines of their own are tried, the largest ones."""
_MOST_PLACES = 7
"""Sequences with which a pipeline may begin."""
_MOST_UNITS = 600
"""Units of all pipelines that are planned, after which those are compared once there is a way."""


def best_pipelines(
    counts: Sequence[int], *, seconds: PipelineSeconds, least_s: Callable[[range], float]
) -> tuple[int, ...] | None:
    """Return how many sequences each pipeline has; None where nothing fits.

    A pipeline may begin with the first sequence of each number of subsequences, n, and with each of
    the longest ones. A pipeline of sequences of n holds n + p - 1 units at a time, of 1 + (p - 1) /
    n of them, rounded up, with their K and V; so there is most to gain from long ones that run one
    after another. Parts of many short ones would have to be smaller than p, and hardly busy.

    By dynamic programming over these places, best[j] = min over i < j of best[i] + seconds of the
    sequences between i and j. As long as the best way has pipelines of which only the least seconds
    are known, theirs are asked for, and it is sought again: most are never asked for. Of large
    steps, with hundreds of units, few are.

    Args:
        counts: subsequences of each sequence, descending.
        seconds: of pipelines, with filling and draining them; one that does not fit does not either
            with further sequences.
        least_s: that a pipeline takes, whatever is recomputed: quicker to tell.
    """
    places = _places(counts)
    whole = range(len(counts))
    known = {whole: seconds(whole)}
    short: list[range] = []
    num_units, enough = 0, False

    def seconds_by_now(own: range) -> float | None:
        if own in known:
            return known[own]
        # What does not fit does not fit with others beside it.
        fits = all(own.start > it.start or it.stop > own.stop for it in short)
        return least_s(own) if fits and not enough else None

    while True:
        best = _best_runs(places, seconds_by_now)
        asked = [own for own in best or () if own not in known]
        if not asked:
            return None if best is None else tuple(map(len, best))
        for own in asked:
            known[own] = seconds(own)
            num_units += sum(counts[own.start : own.stop])
            if known[own] is None:
                short.append(own)
                break
        else:
            enough = num_units > _MOST_UNITS


def _best_runs(places: Sequence[int], seconds: PipelineSeconds) -> list[range] | None:
    """Part sequences at some of the places so that seconds add up to least; None: no way."""
    best: list[tuple[float, list[range]] | None] = [(0.0, [])]
    for end in places[1:]:
        ways = []
        for begin, before in zip(places, best, strict=False):
            own = None if before is None else seconds(range(begin, end))
            if before is not None and own is not None:
                ways.append((before[0] + own, [*before[1], range(begin, end)]))
        best.append(min(ways, key=lambda way: way[0], default=None))
    return None if best[-1] is None else best[-1][1]


def _places(counts: Sequence[int]) -> list[int]:
    """Places of the sequences with which a pipeline may begin, and one past the last sequence."""
    kinds = [
        place for place in range(len(counts)) if place == 0 or counts[place - 1] != counts[place]
    ]
    others = [place for place in range(len(counts)) if place not in kinds]
    kinds = kinds[:_MOST_KINDS]
    return [*sorted([*kinds, *others[: _MOST_PLACES - len(kinds)]]), len(counts)]


def grouped(
    candidate: Candidate, *, alone: EvaluatedCandidate | None, below: float = np.inf
) -> EvaluatedCandidate | None:
    """Return the candidate in several pipelines, simulated; None where that cannot be better.

    Args:
        candidate: with packed sequences, those of most subsequences first.
        alone: the best with one pipeline; None where that does not fit.
        below: seconds of a step, of interest below this.
    """
    counts = [len(sequence.lengths) for sequence in candidate.packed]
    if candidate.pipeline_parallel_degree == 1 or len(counts) == 1:
        return None
    seconds = stage_seconds(candidate)
    end_s = float(of_ranks(candidate, seconds.reduce_s + seconds.update_s).max())
    enough_s = min(below, np.inf if alone is None else alone.step_s) - end_s
    found: dict[range, EvaluatedCandidate] = {}

    def pipeline_s(own: range) -> float | None:
        if len(own) == len(counts):
            return enough_s
        pipeline = fastest_levels(candidate.with_packed(candidate.packed[own.start : own.stop]))
        if pipeline is None:
            return None
        found[own] = pipeline
        return pipeline.step_s - end_s

    bounds = PipelineBounds(candidate)
    pipelines = best_pipelines(counts, seconds=pipeline_s, least_s=bounds.least_s)
    if pipelines is None or len(pipelines) == 1:
        return None
    ends = np.cumsum(pipelines).tolist()
    return _joined(
        candidate.with_packed(candidate.packed, pipelines=pipelines),
        [found[range(begin, end)].placement for begin, end in pairwise((0, *ends))],
    )


def _joined(
    candidate: Candidate, placements: Sequence[ActivationPlacement]
) -> EvaluatedCandidate | None:
    """Return a candidate with the placements of its pipelines; with others where that is too much.

    Blocks that are copied pass through slots as large as the largest of any pipeline.
    """
    tables = (
        np.concatenate([getattr(own, name) for own in placements], axis=1)
        for name in ("retained", "offloaded", "recomputed")
    )
    joined = assess_placement(candidate, ActivationPlacement(*tables))
    return fastest_levels(candidate) if joined.shortfall else simulate_candidate(joined)
