"""Sides of :mod:`experiments.packings`: plans of every step, and their simulated figures.

All sides are planned by the same code with the same rates. Unless the size is given, a side with
fixed chunks uses the number of tokens with which its steps are fastest in simulation. The elastic
sides may hold at most as much memory as the baseline does in its fullest step. All run Seq1F1B
except *elastic_auto*, whose schedule and stages on a rank are planned as well.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from experiments.sample_packings import Packing, fixed_chunks, padded, planned, stream
from sppo.config import check_run
from sppo.cost.candidate import Candidate
from sppo.hardware.description import HardwareSpec
from sppo.hardware.this_machine import divide_cpu
from sppo.planning.elastic.longest_samples import run_of_longest_samples
from sppo.planning.elastic.packing import PackedSamples
from sppo.planning.elastic.samples_plan import STEPS, plan_samples
from sppo.planning.elastic.step_plan import StepPlan
from sppo.planning.elastic.step_planner import StepPlanner, step_planner
from sppo.planning.run_plan import plan_run
from sppo.planning.search.evaluation import evaluate_candidate

LEAST_CHUNK = 256
"""Tokens of the smallest fixed chunks that are tried; further sizes double."""
_ATTEMPTS = 8
"""Largest number of times that a step is planned again for less memory."""


@dataclass(frozen=True, slots=True)
class Request:
    """Request to compare.

    Attributes:
        model: Keys of the model.
        dtype: Type of weights and activations.
        hardware: Machine, with rates of one thread.
        free_bytes: Memory of one rank that plans may use.
        lengths: Tokens of each sample of each step.
        longest: Upper bound of the tokens of a sample.
        row_tokens: Tokens of a row of the stream.
        chunk_tokens: Tokens of a fixed subsequence; None to search the fastest.
    """

    model: Mapping[str, int]
    dtype: str
    hardware: HardwareSpec
    free_bytes: int
    lengths: tuple[tuple[int, ...], ...]
    longest: int
    row_tokens: int
    chunk_tokens: int | None


@dataclass(frozen=True, slots=True, eq=False)
class SideStep:
    """One step of one side of a comparison.

    Attributes:
        packing: Packing of the step's samples.
        plan: Simulated plan of the step.
    """

    packing: Packing
    plan: StepPlan


PACKINGS: dict[str, Callable[..., Packing]] = {
    "padded": padded,
    "stream": stream,
    "fixed": fixed_chunks,
}
"""Functions that pack samples into fixed chunks, by side."""
ELASTIC = ("elastic", "elastic_auto")
SIDES = (*PACKINGS, *ELASTIC)
BASELINE = "fixed"
"""Side that others are compared with."""


def side_steps(request: Request, *, ranks: int, sides: Sequence[str]) -> dict[str, list[SideStep]]:
    """Return the steps of each side, planned for a pipeline of `ranks` ranks.

    Raises:
        MemoryError: A step does not fit.
    """
    planner = _planner(request, ranks=ranks, schedule="sppo")
    found = {side: _in_chunks(planner, request, side) for side in sides if side in PACKINGS}
    limit = max((held_bytes(step.plan) for step in found.get(BASELINE, ())), default=None)
    for side in sides:
        if side in ELASTIC:
            planners = [planner]
            if side == "elastic_auto":
                # With the small chunks that fit the limit, the simple schedule may be faster.
                planners.append(_planner(request, ranks=ranks, schedule="auto"))
            found[side] = min((_in_memory(own, request, limit) for own in planners), key=_seconds)
    return {side: found[side] for side in sides}


def figures(plans: Sequence[StepPlan], lengths: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the figures of simulated steps, given the tokens of their samples."""
    seconds = [plan.step_s for plan in plans]
    candidates = [plan.evaluated.candidate for plan in plans]
    return {
        "step_s": seconds,
        "tokens_per_s": sum(map(sum, lengths)) / sum(seconds),
        "idle_share": statistics.median(plan.bubble_fraction for plan in plans),
        "chunks": [len(candidate.lengths) for candidate in candidates],
        "most_tokens": [max(candidate.lengths) for candidate in candidates],
        "padding_tokens": [
            plan.tokens - sum(tokens) for plan, tokens in zip(plans, lengths, strict=True)
        ],
        "held_bytes": max(map(held_bytes, plans)),
        "paced": [bool(candidate.forwards_before_backward) for candidate in candidates],
        "schedules": [candidate.schedule for candidate in candidates],
        "virtual_stages": candidates[0].virtual_stages,
    }


def held_bytes(plan: StepPlan) -> int:
    """Return the peak of the fullest device, without process growth."""
    return plan.device_peak_bytes - max(rank.device.growth_bytes for rank in plan.evaluated.memory)


def _planner(request: Request, *, ranks: int, schedule: str) -> StepPlanner:
    """Return the step planner that ``sppo train`` would use."""
    keys = {
        "model": dict(request.model),
        "data": {"tokens": ".", "samples": "documents"},
        "sequence": {"length": request.longest},
        "parallel": {
            "pipeline_parallel_degree": ranks,
            "schedule": schedule,
            "multiplexed": "off",
        },
        "train": {"dtype": request.dtype, "samples_per_step": len(request.lengths[0])},
    }
    plan = plan_samples(
        run_of_longest_samples(check_run(keys, source="experiments")),
        partial(
            plan_run,
            hardware=divide_cpu(request.hardware, ranks, threads=1, cores=ranks),
            available_bytes=request.free_bytes,
        ),
        steps=request.lengths[:STEPS],
    )
    return step_planner(plan)


def _in_chunks(planner: StepPlanner, request: Request, side: str) -> list[SideStep]:
    """Return the steps of a side with the fixed chunk size with which they are fastest together.

    Raises:
        MemoryError: There is no size with which all steps fit.
    """
    more = {"row_tokens": request.row_tokens} if side == "stream" else {}
    found: list[list[SideStep]] = []
    problems: list[MemoryError] = []
    for size in _chunk_sizes(request):
        pack = partial(PACKINGS[side], chunk_tokens=size, multiple=planner.multiple, **more)
        packings = [pack(lengths) for lengths in request.lengths]
        try:
            found.append([SideStep(one, _plan_packed(planner, one.packed)) for one in packings])
        except MemoryError as error:
            problems.append(error)
    if not found:
        raise problems[-1]
    return min(found, key=_seconds)


def _plan_packed(planner: StepPlanner, packed: PackedSamples) -> StepPlan:
    """Return the plan for samples that are already packed.

    Raises:
        MemoryError: It does not fit.
    """
    evaluated = evaluate_candidate(planner.base.with_packed(packed.sequences))
    if evaluated.shortfall is not None:
        raise MemoryError(evaluated.shortfall.reason)
    return StepPlan(packed, evaluated)


def _chunk_sizes(request: Request) -> list[int]:
    """Return the sizes of fixed chunks to try, doubling up to the longest sample."""
    if request.chunk_tokens is not None:
        return [request.chunk_tokens]
    sizes = [min(LEAST_CHUNK, request.longest)]
    while 2 * sizes[-1] <= request.longest:
        sizes.append(2 * sizes[-1])
    return sizes


def _seconds(steps: Sequence[SideStep]) -> float:
    return sum(step.plan.step_s for step in steps)


def _in_memory(planner: StepPlanner, request: Request, limit: int | None) -> list[SideStep]:
    """Return the steps of the step planner, each of which holds at most `limit` bytes."""
    plans = [(_within(planner, limit, lengths), lengths) for lengths in request.lengths]
    return [SideStep(planned(plan.packed, lengths), plan) for plan, lengths in plans]


def _within(planner: StepPlanner, limit: int | None, lengths: Sequence[int]) -> StepPlan:
    """Return a step of the step planner that holds at most `limit` bytes."""
    plan = planner.plan(lengths)
    room = plan.evaluated.device_peak_bytes
    for _ in range(_ATTEMPTS):
        excess = 0 if limit is None else held_bytes(plan) - limit
        if excess <= 0:
            break
        room -= excess
        plan = replace(planner, base=_with_memory(planner.base, room)).plan(lengths)
    return plan


def _with_memory(candidate: Candidate, room: int) -> Candidate:
    """Return the candidate for devices with `room` bytes."""
    hardware = candidate.workload.hardware
    device = replace(hardware.device, memory_bytes=room, reserved_bytes=0)
    workload = replace(candidate.workload, hardware=replace(hardware, device=device))
    return replace(candidate, workload=workload)
