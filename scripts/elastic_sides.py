"""Sides of ``compare_elastic.py``: plans and simulations of every step.

All sides are planned by the same code with the same rates. Unless the size is given, a side with
fixed chunks uses the number of tokens with which its steps are fastest in simulation. The elastic
sides may hold at most as much memory as the baseline does in its fullest step. All run Seq1F1B
except *elastic_auto*, whose schedule and stages on a rank are planned as well.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from level_sides import RECOMPUTING_BASELINE, RECOMPUTING_SIDES, recomputing_step

from sppo.activations.tensor_classes import ATTENTION, LINEAR
from sppo.config import check_run
from sppo.hardware.description import HardwareSpec
from sppo.hardware.this_machine import divide_cpu
from sppo.planning.corpus.packings import Packing, fixed_chunks, padded, planned, stream
from sppo.planning.corpus.sides import (
    SideStep,
    chunk_sizes,
    deviation,
    fastest_side,
    time_deviation,
)
from sppo.planning.elastic.longest_samples import run_of_longest_samples
from sppo.planning.elastic.samples_plan import STEPS, plan_samples
from sppo.planning.elastic.step_plan import StepPlan, StepPlanner, step_planner

PACKED_SIDES = ("padded", "stream", "fixed", "elastic", "elastic_auto")
SIDES = (*PACKED_SIDES, *RECOMPUTING_SIDES)
BASELINE = "fixed"
BASELINES = (BASELINE, RECOMPUTING_BASELINE)
"""Sides that others are compared with; the first of them that is present is used."""
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
        memory_share: Share of the bytes between recomputing and retaining everything that sides
            with recomputation may use.
    """

    model: Mapping[str, int]
    dtype: str
    hardware: HardwareSpec
    free_bytes: int
    lengths: tuple[tuple[int, ...], ...]
    longest: int
    row_tokens: int
    chunk_tokens: int | None
    memory_share: float


def side_steps(request: Request, *, ranks: int, sides: Sequence[str]) -> dict[str, list[SideStep]]:
    """Return the steps of each side, planned for a pipeline of `ranks` ranks.

    Raises:
        MemoryError: A step does not fit.
    """
    planner = _planner(request, ranks=ranks, schedule="sppo")
    packings: dict[str, Callable[..., Packing]] = {
        "padded": padded,
        "stream": partial(stream, row_tokens=request.row_tokens),
        "fixed": fixed_chunks,
    }
    found = {
        side: _fastest(planner, request, pack=packings[side]) for side in sides if side in packings
    }
    limit = max((held_bytes(step.plan) for step in found.get(BASELINE, ())), default=None)
    for side in sides:
        if side in RECOMPUTING_SIDES:
            found[side] = [
                _recomputing(planner, request, lengths, side=side) for lengths in request.lengths
            ]
        elif side not in packings:
            planners = [planner]
            if side == "elastic_auto":
                # With the small chunks that fit the limit, the simple schedule may be faster.
                planners.append(_planner(request, ranks=ranks, schedule="auto"))
            tried = [
                [_elastic(own, lengths, limit) for lengths in request.lengths] for own in planners
            ]
            found[side] = min(tried, key=_total_s)
    return {side: found[side] for side in sides}


def _total_s(steps: Sequence[SideStep]) -> float:
    return sum(step.plan.step_s for step in steps)


def figures(steps: Sequence[SideStep], *, lengths: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the figures of the simulated steps of a side."""
    seconds = [step.plan.step_s for step in steps]
    plans = [step.plan for step in steps]
    return {
        "step_s": seconds,
        "tokens_per_s": sum(map(sum, lengths)) / sum(seconds),
        "idle_share": statistics.median(plan.bubble_fraction for plan in plans),
        "subsequences": [len(plan.evaluated.candidate.lengths) for plan in plans],
        "most_tokens": [max(plan.evaluated.candidate.lengths) for plan in plans],
        "padding_tokens": [
            plan.tokens - sum(of_step) for plan, of_step in zip(plans, lengths, strict=True)
        ],
        "time_deviation": statistics.median(map(time_deviation, plans)),
        "length_deviation": statistics.median(
            deviation(plan.evaluated.candidate.lengths) for plan in plans
        ),
        "held_bytes": max(map(held_bytes, plans)),
        "recomputed_share": [_recomputed_share(plan) for plan in plans],
        "paced": [bool(plan.evaluated.candidate.forwards_before_backward) for plan in plans],
        "schedules": [plan.evaluated.candidate.schedule for plan in plans],
        "virtual_stages": plans[0].evaluated.candidate.virtual_stages,
        "planning_s": statistics.median(step.planning_s for step in steps),
    }


def _planner(request: Request, *, ranks: int, schedule: str) -> StepPlanner:
    """Return the step planner that `sppo train` would use."""
    run = check_run(
        {
            "model": dict(request.model),
            "data": {"tokens": ".", "samples": "documents"},
            "sequence": {"length": request.longest},
            "parallel": {
                "pipeline_parallel_degree": ranks,
                "schedule": schedule,
                "multiplexed": "off",
            },
            "train": {"dtype": request.dtype, "samples_per_step": len(request.lengths[0])},
        },
        source="scripts/compare_elastic.py",
    )
    plan = plan_samples(
        run_of_longest_samples(run),
        hardware=divide_cpu(request.hardware, ranks, threads=1, cores=ranks),
        available_bytes=request.free_bytes,
        steps=request.lengths[:STEPS],
    )
    return step_planner(plan)


def held_bytes(plan: StepPlan) -> int:
    """Return the peak of the fullest device, without process growth."""
    return plan.device_peak_bytes - max(rank.device.growth_bytes for rank in plan.evaluated.memory)


def _recomputing(
    planner: StepPlanner, request: Request, lengths: Sequence[int], *, side: str
) -> SideStep:
    """Return a step of a side that recomputes."""
    begin = time.perf_counter()
    plan = recomputing_step(planner, lengths, side=side, memory_share=request.memory_share)
    seconds = time.perf_counter() - begin
    return SideStep(planned(plan.packed, lengths), plan, seconds)


def _elastic(planner: StepPlanner, lengths: Sequence[int], limit: int | None) -> SideStep:
    """Return a step of the step planner that holds at most `limit` bytes."""
    begin = time.perf_counter()
    plan = planner.plan(lengths)
    seconds = time.perf_counter() - begin
    room = plan.evaluated.device_peak_bytes
    for _ in range(_ATTEMPTS):
        excess = 0 if limit is None else held_bytes(plan) - limit
        if excess <= 0:
            break
        room -= excess
        begin = time.perf_counter()
        plan = _with_room(planner, room).plan(lengths)
        seconds = time.perf_counter() - begin
    return SideStep(planned(plan.packed, lengths), plan, seconds)


def _with_room(planner: StepPlanner, room: int) -> StepPlanner:
    """Return a planner for devices with `room` bytes."""
    workload = planner.base.workload
    device = replace(workload.hardware.device, memory_bytes=room, reserved_bytes=0)
    hardware = replace(workload.hardware, device=device)
    base = replace(planner.base, workload=replace(workload, hardware=hardware))
    return planner.with_base(base)


def _fastest(
    planner: StepPlanner, request: Request, *, pack: Callable[..., Packing]
) -> list[SideStep]:
    """Return the steps with the chunk size with which they are fastest together."""
    packs = [
        partial(_packed, pack, lengths, multiple=planner.multiple) for lengths in request.lengths
    ]
    sizes = chunk_sizes(least=LEAST_CHUNK, most=request.longest)
    if request.chunk_tokens is not None:
        sizes = [request.chunk_tokens]
    return fastest_side(planner, packs, sizes=sizes)


def _packed(
    pack: Callable[..., Packing], lengths: Sequence[int], chunk_tokens: int, *, multiple: int
) -> Packing:
    return pack(lengths, chunk_tokens=chunk_tokens, multiple=multiple)


def _recomputed_share(plan: StepPlan) -> float:
    """Return the share of rows of the attention and linear classes that backward recomputes."""
    placement = plan.evaluated.placement
    recomputable = [ATTENTION, LINEAR]
    rows = len(recomputable) * len(placement.recomputed) * int(placement.tokens.sum())
    return float(placement.recomputed[:, :, recomputable].sum() / rows)
