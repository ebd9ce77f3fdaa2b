"""Lower bounds of what a candidate takes, whatever its activation policy places: time, memory."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from sppo.cost.candidate import Candidate, of_ranks
from sppo.cost.memory.state_memory import state_memory
from sppo.cost.stages.seconds import stage_seconds
from sppo.planning.search.kv_choices import kv_choices
from sppo.planning.search.shortfall import Shortfall, find_shortfall
from sppo.schedule.orders.names import DEFERRING_WEIGHTS


@lru_cache(maxsize=4096)
def least_seconds(candidate: Candidate) -> float:
    """Return a lower bound of the step time of a candidate over all activation policies.

    The *way* through a rank is such a bound: the first unit travels down to the rank, the rank runs
    all its work, and the backward of that unit, its last action unless weight halves are put off,
    travels up to the first rank. Units that are cut over ranks (MSP) travel faster: then it is the
    work of a mean rank.
    """
    seconds, ranks = stage_seconds(candidate), candidate.pipeline_parallel_degree
    updated_s = seconds.reduce_s + seconds.update_s
    passes = seconds.forward + seconds.backward + seconds.weight
    work_s = of_ranks(candidate, passes.sum(axis=1) + updated_s)
    behind_s, last = np.zeros(ranks), candidate.last_backward_stages
    behind_s[last % ranks] = updated_s[last]
    work_s = work_s - behind_s + behind_s.min()
    if candidate.schedule == "sppo_msp":
        return float(work_s.mean())
    defers = candidate.schedule in DEFERRING_WEIGHTS
    way_s = seconds.forward[: ranks - 1, 0] if defers else passes[: ranks - 1, 0]
    return float((work_s + np.concatenate([[0.0], np.cumsum(way_s)])).max())


def may_fit(candidate: Candidate) -> bool:
    """Return whether a candidate may fit under some activation policy: a quick, necessary check."""
    return least_shortfall(candidate) is None


def least_shortfall(candidate: Candidate) -> Shortfall | None:
    """Return a lower bound of what a candidate lacks under every placement; None if it may fit."""
    lacking = []
    for choice in kv_choices(candidate):
        shortfall = _least_shortfall(choice)
        if shortfall is None:
            return None
        lacking.append(shortfall)
    return min(lacking, key=lambda shortfall: shortfall.short_bytes)


def _least_shortfall(candidate: Candidate) -> Shortfall | None:
    """Return a lower bound of what a candidate with a given placement of K and V lacks."""
    if candidate.schedule == "sppo_msp":
        # A program that cuts units runs one sequence after another.
        candidate = replace(candidate, sequences=1)
    shortfall = find_shortfall(candidate, state_memory(candidate))
    return None if shortfall is None else replace(shortfall, at_least=True)
