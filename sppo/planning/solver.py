"""The best way to run a model on a machine: degrees of parallelism, cuts, schedule, policy.

Every way to divide the devices is tried with every number of subsequences worth trying, priced
in closed form, and dropped with the reason where it does not fit. The best few are simulated; the
simulation decides between them. Everything is deterministic: same request, same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sppo.config.run import RunConfig
from sppo.cost.candidate import Candidate
from sppo.cost.layer import Workload
from sppo.cost.stage_cost import stage_costs, stage_seconds
from sppo.cost.step_time import step_time
from sppo.hardware.description import HardwareSpec
from sppo.planning.best_schedule import with_best_schedule
from sppo.planning.choices import (
    Degrees,
    cut_sequence,
    degrees_to_try,
    machine_asked_for,
    subsequence_counts_to_try,
)
from sppo.planning.evaluated_candidate import EvaluatedCandidate, Shortfall, assess, leaves_room
from sppo.planning.simulated_candidate import simulate_candidate

RUNNERS_UP = 3
_SIMULATED = 4
_SIMULATED_UNITS = 12000
"""Stages x units of all simulations together: what fits in two or three seconds."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Degrees that do not fit or cannot work.

    Attributes:
        degrees: Which.
        num_subsequences: N that came nearest to fitting; None where it does not depend on N.
        policy: Activation policy that came nearest.
        reason: Text that says why.
        shortfall: Where memory is short.
    """

    degrees: Degrees
    reason: str
    num_subsequences: int | None = None
    policy: str | None = None
    shortfall: Shortfall | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """The answer to a request.

    Attributes:
        run: The request.
        hardware: The machine.
        best: The recommended way; None where nothing fits.
        runners_up: The next best with other degrees, best first.
        by_num_subsequences: The best way's degrees with every N worth trying, by N.
        rejected: What does not fit or cannot work.
    """

    run: RunConfig
    hardware: HardwareSpec
    best: EvaluatedCandidate | None
    runners_up: tuple[EvaluatedCandidate, ...]
    by_num_subsequences: tuple[EvaluatedCandidate, ...]
    rejected: tuple[Rejection, ...]


def solve(run: RunConfig, *, hardware: HardwareSpec) -> Solution:
    """The best way to train `run` on `hardware`, with the reasons for the rest.

    Raises:
        ValueError: the run asks for what the machine or the model cannot do.
    """
    fitting, rejected = enumerate_candidates(run, hardware=hardware)
    leaders = _simulated(sorted(fitting, key=_rank))
    if not leaders:
        return Solution(run, hardware, None, (), (), tuple(rejected))
    return Solution(
        run,
        hardware,
        best=with_best_schedule(run, leaders[0]),
        runners_up=tuple(leaders[1 : 1 + RUNNERS_UP]),
        by_num_subsequences=options_by_num_subsequences(run, best=leaders[0]),
        rejected=tuple(rejected),
    )


def enumerate_candidates(
    run: RunConfig, *, hardware: HardwareSpec, subsequence_counts: Sequence[int] | None = None
) -> tuple[list[EvaluatedCandidate], list[Rejection]]:
    """Return the best candidate of every way to divide the devices, and what fails."""
    possible, refused = degrees_to_try(run, hardware=hardware)
    counts = subsequence_counts or subsequence_counts_to_try(run, hardware=hardware)
    fitting: list[EvaluatedCandidate] = []
    rejected = [Rejection(refusal.degrees, refusal.reason) for refusal in refused]
    for degrees in possible:
        candidates = [
            candidate_of_subsequences(
                run, hardware=hardware, degrees=degrees, num_subsequences=num_subsequences
            )
            for num_subsequences in counts
        ]
        best = _fastest(candidates)
        if best.shortfall is None:
            fitting.append(best)
        else:
            rejected.append(_rejection(degrees, best))
    return fitting, rejected


def options_by_num_subsequences(
    run: RunConfig, *, best: EvaluatedCandidate
) -> tuple[EvaluatedCandidate, ...]:
    """The degrees of `best` with every N that is worth trying and fits, by N."""
    hardware = best.candidate.workload.hardware
    fitting = []
    for num_subsequences in subsequence_counts_to_try(run, hardware=hardware):
        candidate = candidate_of_subsequences(
            run, hardware=hardware, degrees=best.degrees, num_subsequences=num_subsequences
        )
        evaluated = assess(candidate)
        if evaluated.shortfall is None:
            fitting.append(evaluated)
    return tuple(fitting)


def candidate_of_subsequences(
    run: RunConfig, *, hardware: HardwareSpec, degrees: Degrees, num_subsequences: int
) -> Candidate:
    """The run with these degrees and so many subsequences."""
    workload = workload_of(run, hardware=hardware, degrees=degrees)
    lengths = cut_sequence(
        run,
        num_subsequences=num_subsequences,
        workload=workload,
        num_stages=degrees.pipeline_parallel,
    )
    return candidate_of(run, workload, degrees, lengths=lengths)


def workload_of(run: RunConfig, *, hardware: HardwareSpec, degrees: Degrees) -> Workload:
    """What a device computes, with the tiers behind it that the run allows."""
    return Workload(
        run.model,
        machine_asked_for(run, hardware=hardware),
        dtype=run.train.dtype,
        sequence_parallel_degree=degrees.sequence_parallel,
        sequence_parallel=run.parallel.sequence_parallel,
    )


def candidate_of(
    run: RunConfig, workload: Workload, degrees: Degrees, *, lengths: tuple[int, ...]
) -> Candidate:
    """The run with these degrees and cuts, everything else as it asks."""
    schedule, policy = run.parallel.schedule, run.activations.policy
    ratio = run.activations.offload_ratio
    return Candidate(
        workload,
        lengths,
        sequences=run.train.sequences_per_step // degrees.data_parallel,
        pipeline_parallel_degree=degrees.pipeline_parallel,
        data_parallel_degree=degrees.data_parallel,
        schedule="sppo" if schedule == "auto" else schedule,
        policy="hybrid" if policy == "auto" else policy,
        offload_ratio=None if ratio == "auto" else ratio,
        zero=run.parallel.zero,
        # A CPU's host memory is the device's: there is nowhere to go.
        offload_optimizer=run.optimizer.offload and workload.hardware.device.kind != "cpu",
        input_every=run.activations.input_every,
        background_saves=run.checkpoint.async_save,
        # Where weights are sharded, tensors are recomputed whole or not at all.
        allow_partial=workload.sequence_parallel == "ulysses" or degrees.sequence_parallel == 1,
    )


def _fastest(candidates: Sequence[Candidate]) -> EvaluatedCandidate:
    """The fastest that fits of candidates that differ in N; the one short of least if none does.

    Branch and bound: keeping everything bounds the time of every policy from below, so a candidate
    whose bound is above the best found is never looked at. Without saved activations memory only
    shrinks with the number of subsequences, so where the last one leaves room for none, none does.
    """
    if not leaves_room(candidates[-1]):
        return assess(candidates[-1])
    priced = []
    for candidate in candidates:
        seconds = stage_seconds(candidate)
        bound = step_time(
            stage_costs(candidate, seconds=seconds), num_sequences=candidate.sequences
        )
        priced.append((bound.step_s, len(candidate.lengths), candidate, seconds))
    best = nearest = None
    for bound_s, _, candidate, seconds in sorted(priced, key=lambda item: item[:2]):
        if best is not None and bound_s > best.time.step_s:
            break
        evaluated = assess(candidate, seconds=seconds)
        if evaluated.shortfall is None:
            best = min(best or evaluated, evaluated, key=_rank)
        else:
            nearest = min(nearest or evaluated, evaluated, key=_short)
    chosen = best or nearest
    assert chosen is not None, "there is at least one number of subsequences to try"
    return chosen


def _rank(evaluated: EvaluatedCandidate) -> tuple[float, int, int, int]:
    """Faster first; of equals the one with fewer devices, fewer stages, fewer subsequences."""
    degrees = evaluated.degrees
    return (
        float(f"{evaluated.step_s:.9g}"),
        degrees.num_devices,
        degrees.pipeline_parallel,
        len(evaluated.candidate.lengths),
    )


def _simulated(leaders: Sequence[EvaluatedCandidate]) -> list[EvaluatedCandidate]:
    """`leaders`, fastest first, with the first few simulated and all that might be faster still.

    The closed form is never above the simulation, so from the first one that is not below the best
    simulated on, none can be faster. Where simulating takes too long the closed form decides about
    all, because a simulated time and a closed form say nothing about each other.
    """
    played: list[EvaluatedCandidate] = []
    fastest_s, units = float("inf"), 0
    for place, evaluated in enumerate(leaders):
        if place >= _SIMULATED and evaluated.step_s >= fastest_s:
            break
        units += evaluated.costs.forward_s.size
        if units > _SIMULATED_UNITS:
            return list(leaders)
        played.append(simulate_candidate(evaluated))
        fastest_s = min(fastest_s, played[-1].step_s)
    return sorted(played, key=_rank) + list(leaders[len(played) :])


def _short(evaluated: EvaluatedCandidate) -> int:
    assert evaluated.shortfall is not None, "only asked of what does not fit"
    return evaluated.shortfall.short_bytes


def _rejection(degrees: Degrees, nearest: EvaluatedCandidate) -> Rejection:
    from sppo.planning.advice import explain

    assert nearest.shortfall is not None, "only made of what does not fit"
    candidate = nearest.candidate
    return Rejection(
        degrees,
        explain(nearest.shortfall),
        num_subsequences=len(candidate.lengths),
        policy=candidate.policy,
        shortfall=nearest.shortfall,
    )
