"""The sides of ``compare_elastic.py``, planned and simulated: what each runs in every step.

Every side is planned by the same code from the same rates. Where nothing else is asked for, a side
of fixed chunks takes the number of tokens with which its steps are simulated to be fastest. The
elastic sides may hold no more than the baseline does in the step in which that holds most. All run
Seq1F1B but *elastic_auto*, whose schedule and stages on a rank are planned, too.
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
"""Sides that others are compared with: the first of these that is there."""
LEAST_CHUNK = 256
"""Tokens of the smallest fixed chunks that are tried; larger ones double."""
_ATTEMPTS = 8
"""Times that a step is planned anew for less memory."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is compared.

    Attributes:
        model: Keys of the model.
        dtype: Of weights and activations.
        hardware: The machine, whose rates hold for one thread.
        free_bytes: Memory of one rank that plans may fill.
        lengths: Tokens of each sample of each step.
        longest: Tokens of the longest sample there may be.
        row_tokens: Tokens of a row of the stream.
        chunk_tokens: Of a subsequence where it is fixed; None leaves it open.
        memory_share: Of the bytes between recomputing and retaining everything, those that sides
            which recompute may fill.
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
    """Return the steps of each side, planned for a pipeline of so many ranks.

    Raises:
        MemoryError: a step does not fit.
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
                # Within the limit it may have to cut so small that the simple schedule is faster.
                planners.append(_planner(request, ranks=ranks, schedule="auto"))
            tried = [
                [_elastic(own, lengths, limit) for lengths in request.lengths] for own in planners
            ]
            found[side] = min(tried, key=_total_s)
    return {side: found[side] for side in sides}


def _total_s(steps: Sequence[SideStep]) -> float:
    return sum(step.plan.step_s for step in steps)


def figures(steps: Sequence[SideStep], *, lengths: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return what the simulated steps of a side come to."""
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
    """What `sppo train` plans steps with."""
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
    """Return what the fullest device holds, but for what its process takes beside tensors."""
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
    """Return a step as the planner of steps makes it, holding at most so many bytes."""
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
    """Return a planner for devices with so many bytes."""
    workload = planner.base.workload
    device = replace(workload.hardware.device, memory_bytes=room, reserved_bytes=0)
    hardware = replace(workload.hardware, device=device)
    base = replace(planner.base, workload=replace(workload, hardware=hardware))
    return replace(planner, base=base)


def _fastest(
    planner: StepPlanner, request: Request, *, pack: Callable[..., Packing]
) -> list[SideStep]:
    """Return the steps in chunks of the size with which they are fastest together."""
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
    """Share of the rows of the attention and linear classes that backward recomputes."""
    placement = plan.evaluated.placement
    recomputable = [ATTENTION, LINEAR]
    rows = len(recomputable) * len(placement.recomputed) * int(placement.tokens.sum())
    return float(placement.recomputed[:, :, recomputable].sum() / rows)
