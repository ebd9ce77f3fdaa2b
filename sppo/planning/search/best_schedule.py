"""Choice of the fastest schedule of a candidate, and its memory under the chosen program."""

from __future__ import annotations

from dataclasses import replace

from sppo.config.run import RunConfig
from sppo.cost.candidate import Candidate
from sppo.planning.search.candidate_search import WORTH_IT
from sppo.planning.search.choices import (
    asked_schedule,
    multiplexed_problem,
    places_kv,
    subsequence_problem,
)
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate, with_executed_program
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.planning.search.host_memory import with_less_host_memory
from sppo.planning.search.simulated_candidate import simulate_candidate

_ATTEMPTS = 3
"""Most times that a candidate is scheduled again, with less memory for its activations."""
SCHEDULED_UNITS = 1200
"""Stages x units up to which other schedules are tried, which takes about a second."""


def scheduled(run: RunConfig, evaluated: EvaluatedCandidate) -> EvaluatedCandidate:
    """Simulate a candidate that fits, with the fastest schedule if the run leaves it open.

    Its activations then take less host memory if that costs up to 1 % of the step. Only the program
    shows how many messages are held at once. If that is too much memory, the candidate is evaluated
    again with as much less memory for its activations; if it does not fit then either, it is
    returned with what it lacks. A candidate that does not fit is returned unchanged.
    """
    found, before = evaluated, evaluated.candidate.spare_bytes
    spare = before
    for _ in range(_ATTEMPTS):
        if evaluated.shortfall is not None:
            break
        best = with_less_host_memory(with_best_schedule(run, simulate_candidate(evaluated)))
        candidate = replace(best.candidate, spare_bytes=before)
        found = with_executed_program(replace(best, candidate=candidate))
        if found.shortfall is None:
            break
        more = _most_added(best, found)
        spare = max(spare + found.shortfall.short_bytes * 5 // 4, before + more)
        evaluated = evaluate_candidate(replace(evaluated.candidate, spare_bytes=spare))
    return found


def _most_added(evaluated: EvaluatedCandidate, executed: EvaluatedCandidate) -> int:
    """Return the most bytes by which the executed program of a candidate raises a rank's memory."""
    return max(
        after.device.total_bytes - before.device.total_bytes
        for before, after in zip(evaluated.memory, executed.memory, strict=True)
    )


def with_best_schedule(run: RunConfig, best: EvaluatedCandidate) -> EvaluatedCandidate:
    """Return `best` with its fastest schedule, if the run leaves the schedule open.

    Tried are the zero-bubble schedule, multiplexed sequence partitioning (MSP) if training can run
    it, and the interleaved schedule if ranks have several stages. Each is evaluated with its own
    memory.
    """
    candidate = best.candidate
    if asked_schedule(run) != "auto" or candidate.pipeline_parallel_degree == 1:
        return best
    if places_kv(run):  # no other schedule offloads or recomputes K and V
        return best if best.simulated is not None else simulate_candidate(best)
    streams = candidate.state.streams_weights or candidate.state.streams_gradients
    if best.costs.forward_s.size > SCHEDULED_UNITS:
        return best
    if best.simulated is None:
        best = simulate_candidate(best)
    virtual = candidate.virtual_stages
    others = [replace(candidate, schedule="interleaved_seq1f1b")] if virtual > 1 else []
    if not streams and (virtual == 1 or run.parallel.virtual_stages == "auto"):
        others.append(replace(candidate, schedule="seq_zb_h1", virtual_stages=1))
    if run.parallel.multiplexed == "auto" and not streams and _may_share(run, best):
        multiplexed = replace(candidate, schedule="sppo_msp", kv="retained")
        others.append(multiplexed)
        if virtual > 1 and run.parallel.virtual_stages == "auto":
            others.append(replace(multiplexed, virtual_stages=1))
    for candidate in others:
        other = _simulated(candidate)
        if other is not None and other.step_s <= best.step_s * WORTH_IT:
            best = other
    return best


def _may_share(run: RunConfig, best: EvaluatedCandidate) -> bool:
    """Return whether training could shard the units of `best` over pipeline ranks (MSP)."""
    degrees, lengths = best.degrees, best.candidate.lengths
    return (
        multiplexed_problem(run, degrees=degrees)
        or subsequence_problem(run, lengths=lengths, degrees=degrees, uses_msp=True)
    ) is None


def _simulated(candidate: Candidate) -> EvaluatedCandidate | None:
    """Return the candidate evaluated and simulated; None if it does not fit."""
    evaluated = evaluate_candidate(candidate)
    return simulate_candidate(evaluated) if evaluated.shortfall is None else None
