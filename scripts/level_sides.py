"""Sides of ``compare_elastic.py`` that recompute: equally packed samples in little memory.

In every step a device has memory between what recomputing everything and what retaining everything
needs, so that something must be recomputed. *recompute_all*: everything. *recompute_uniform*: the
same number of layers for all subsequences on all stages, the least that fits. *checkpointing*:
InfiniPipe's integer program over numbers of layers. *levels*: the levels of SPPO's planner. Nothing
is offloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from sppo.cost.candidate import Candidate
from sppo.planning.elastic.levels import LEVELS, checkpointing_levels, fastest_levels, place_levels
from sppo.planning.elastic.step_plan import StepPlan, StepPlanner
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.planning.search.simulated_candidate import simulate_candidate

RECOMPUTING_BASELINE = "recompute_all"


def recomputing_step(
    planner: StepPlanner, lengths: Sequence[int], *, side: str, memory_share: float
) -> StepPlan:
    """Return a step of a side that recomputes.

    Args:
        planner: Step planner; it packs the samples as if everything could be retained.
        lengths: Tokens of each sample.
        side: Key of `RECOMPUTING_SIDES`.
        memory_share: Share of the bytes between recomputing and retaining everything that is
            available.

    Raises:
        MemoryError: The step does not fit.
    """
    packed = planner.plan(lengths).packed
    base = _without_tier(planner.base)
    candidate = _with_memory(base.with_packed(packed.sequences), memory_share)
    found = RECOMPUTING_SIDES[side](candidate)
    if found is None:
        raise MemoryError(f"{side} does not fit: take a larger --memory-share than {memory_share}")
    return StepPlan(packed, found)


def _everything(candidate: Candidate) -> EvaluatedCandidate | None:
    placed = place_levels(candidate, levels=LEVELS[-1:])
    return None if placed is None else simulate_candidate(placed)


def _uniform(candidate: Candidate) -> EvaluatedCandidate | None:
    """Return the candidate with the fewest recomputed layers, the same number in all units."""
    for level in checkpointing_levels(len(candidate.stages[0])):
        placed = place_levels(candidate, levels=[level])
        if placed is not None:
            return simulate_candidate(placed)
    return None


def _checkpointing(candidate: Candidate) -> EvaluatedCandidate | None:
    levels = checkpointing_levels(len(candidate.stages[0]))
    placed = place_levels(candidate, levels=levels, counts_shares=True)
    return None if placed is None else simulate_candidate(placed)


RECOMPUTING_SIDES: dict[str, Callable[[Candidate], EvaluatedCandidate | None]] = {
    RECOMPUTING_BASELINE: _everything,
    "recompute_uniform": _uniform,
    "checkpointing": _checkpointing,
    "levels": fastest_levels,
}


def _without_tier(base: Candidate) -> Candidate:
    """Return a candidate for a machine whose devices have neither host memory nor disk."""
    hardware = base.workload.hardware
    node = replace(hardware.node, host_memory_bytes=0, disk_bytes=0)
    return replace(base, workload=replace(base.workload, hardware=replace(hardware, node=node)))


def _with_memory(candidate: Candidate, share: float) -> Candidate:
    """Return the candidate for devices with `share` of the bytes that recomputing saves."""
    least, most = (
        evaluate_candidate(replace(candidate, policy=policy)).device_peak_bytes
        for policy in ("recompute", "retain")
    )
    hardware = candidate.workload.hardware
    device = replace(
        hardware.device, memory_bytes=round(least + share * (most - least)), reserved_bytes=0
    )
    hardware = replace(hardware, device=device)
    return replace(candidate, workload=replace(candidate.workload, hardware=hardware))
