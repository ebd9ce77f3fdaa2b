"""Timing of attention forward and backward as the engine calls them, on a grid, per back end.

The backward adds to fp32 gradients of all keys, as in training. The back end that ``auto`` chooses
is timed on all shapes; other back ends only on shapes for which a call does not take too long, as
predicted from shorter calls.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

import torch

from sppo.bench.attention_backends import (
    BackendComparison,
    BackendRate,
    BackendShape,
    backends_to_try,
    why_not_timed,
)
from sppo.bench.attention_grid import AttentionGrid, AttentionShape
from sppo.bench.operands import DTYPES, Operands
from sppo.bench.timing import Call, KernelBench, TimedCase, Timing
from sppo.hardware.rates import AttentionPoint
from sppo.kernels.attention.choice import BackendName, chosen_name
from sppo.kernels.attention.interface import attention_backward, attention_forward
from sppo.kernels.attention.kv_layout import empty_keys

Direction = Literal["forward", "backward"]
AttentionKey = tuple[BackendName, AttentionShape, Direction]

_FIRST_PROBE = {"cpu": 256, "cuda": 1024}
"""Most queries and keys of the first call that estimates the speed of a back end."""
_LONGEST_S = {"cpu": 0.2, "cuda": 0.05}
"""Most seconds of a call of a back end that ``auto`` does not choose."""
_LONGEST_ASKED_S = 2.0
_LONGEST_AUTOMATIC_S = 0.4


def measure_attention(bench: KernelBench, grid: AttentionGrid) -> BackendComparison:
    """Time back ends on spans at the end of prefixes, all cases in every round.

    At least one back end must support a problem of the grid.
    """
    reasons: dict[BackendShape, str | None] = {}
    automatic: dict[AttentionShape, BackendName] = {}
    for shapes in grid.problems(bench.dtypes):
        taken = chosen_name("auto", shapes[0].case(bench.operands.device))
        found = _why_left_out(bench, grid, shapes, taken)
        reasons |= found
        automatic |= {shape: taken for (_, shape), reason in found.items() if reason is None}
    chosen = [pair for pair, reason in reasons.items() if reason is None]
    directions: tuple[Direction, ...] = ("forward", "backward")
    cases: list[TimedCase[AttentionKey]] = [
        TimedCase((*pair, direction), partial(_make, bench.operands, *pair, direction))
        for pair in chosen
        for direction in directions
    ]
    timings = bench.time("attention", cases)
    rates = tuple(
        _rate(*pair, timings[*pair, "forward"], timings[*pair, "backward"]) for pair in chosen
    )
    left_out = {pair: reason for pair, reason in reasons.items() if reason is not None}
    return BackendComparison(rates, automatic, left_out)


def attention_points(
    comparison: BackendComparison, grid: AttentionGrid
) -> tuple[AttentionPoint, ...]:
    """Return the rates for plans: the back end that ``auto`` chooses, the first heads of the grid.

    The result is empty if plans cannot read the grid, or if that back end was not timed.
    """
    if not grid.for_plans:
        return ()
    return tuple(
        AttentionPoint(
            shape.dtype,
            shape.head_size,
            shape.queries,
            shape.keys,
            rates[taken].forward_flops_per_s,
            rates[taken].backward_flops_per_s,
        )
        for shape, rates in comparison.by_shape.items()
        if shape.heads == grid.heads[0] and (taken := comparison.automatic[shape]) in rates
    )


def _why_left_out(
    bench: KernelBench, grid: AttentionGrid, shapes: list[AttentionShape], taken: BackendName
) -> dict[BackendShape, str | None]:
    """Return by back end and shape of one problem why it is not timed; None if it is.

    Args:
        bench: What all measurements share.
        grid: Grid that the shapes belong to.
        shapes: Shapes that differ in length only, so that a back end supports all or none.
        taken: Back end that ``auto`` chooses.
    """
    device = bench.operands.device
    case = shapes[0].case(device)
    reasons = {name: why_not_timed(name, case) for name in backends_to_try(grid, device=device)}
    able = [name for name, reason in reasons.items() if reason is None]
    first = taken if taken in able else next(iter(able), None)
    if first is not None and not grid.fixed:
        shapes = _shorter(bench, first, shapes)
    longest_s = _LONGEST_ASKED_S if grid.fixed else _LONGEST_S[device]
    found: dict[BackendShape, str | None] = {}
    for name, reason in reasons.items():
        gaps = dict.fromkeys(shapes, reason)
        if reason is None and name != first:
            gaps = _gaps(bench, name, shapes, longest_s)
        found |= {(name, shape): why for shape, why in gaps.items()}
    return found


def _gaps(
    bench: KernelBench, name: BackendName, shapes: list[AttentionShape], longest_s: float
) -> dict[AttentionShape, str | None]:
    """Return by shape why a back end is not timed, None if it is; for all but ``auto``'s choice.

    A package may compute a small case correctly and fail on a larger one: only that shape of that
    back end is left out.
    """
    gaps: dict[AttentionShape, str | None] = dict.fromkeys(shapes)
    try:
        in_time = _in_time(bench, name, shapes, longest_s)
    except Exception as error:  # third-party packages may raise anything
        return dict.fromkeys(shapes, _failure(error))
    for shape in shapes:
        if shape not in in_time:
            gaps[shape] = f"would take longer than {longest_s:g} s a call"
            continue
        try:
            bench.time_once(_make(bench.operands, name, shape, "backward"))
        except Exception as error:  # as above
            gaps[shape] = _failure(error)
    return gaps


def _shorter(
    bench: KernelBench, name: BackendName, shapes: list[AttentionShape]
) -> list[AttentionShape]:
    """Return ``shapes`` without those whose queries take too long; keep two numbers of queries."""
    queries = sorted({shape.queries for shape in shapes})
    probe = max((shape for shape in shapes if shape.queries == queries[0]), key=lambda s: s.keys)
    seconds = _probe(bench, name, probe)
    while len(queries) > 2 and seconds * (queries[-1] / probe.queries) ** 2 > _LONGEST_AUTOMATIC_S:
        queries.pop()
    return [shape for shape in shapes if shape.queries in queries]


def _in_time(
    bench: KernelBench, name: BackendName, shapes: list[AttentionShape], longest_s: float
) -> list[AttentionShape]:
    """Return the shapes whose backward is predicted to take at most ``longest_s``.

    Predictions come from shorter shapes, which need more time per FLOP than long ones. So before a
    shape is left out, a part of its queries is timed that should take a quarter of ``longest_s``.
    """
    most = _FIRST_PROBE[bench.operands.device]
    rising = sorted(shapes, key=lambda shape: shape.forward_flops)
    tried = replace(rising[0], queries=min(rising[0].queries, most), keys=min(rising[0].keys, most))
    s_per_flop = _probe(bench, name, tried) / tried.forward_flops
    for count, shape in enumerate(rising):
        foretold_s = s_per_flop * shape.forward_flops
        if foretold_s > longest_s:
            some = max(1, int(shape.queries * longest_s / (4 * foretold_s)))
            tried = replace(shape, queries=some)
            s_per_flop = _probe(bench, name, tried) / tried.forward_flops
        if s_per_flop * shape.forward_flops > longest_s:
            return rising[:count]
    return rising


def _probe(bench: KernelBench, name: BackendName, shape: AttentionShape) -> float:
    """Return the seconds of one warm backward."""
    return bench.time_once(_make(bench.operands, name, shape, "backward"))


def _failure(error: Exception) -> str:
    """Return a description of a back end's error, as the end of a sentence."""
    first_line = (str(error).splitlines() or [""])[0]
    return f"fails with {type(error).__name__}: {first_line}"


def _rate(
    name: BackendName, shape: AttentionShape, forward: Timing, backward: Timing
) -> BackendRate:
    spread = max(forward.spread, backward.spread)
    return BackendRate(name, shape, forward.median_s, backward.median_s, spread)


@torch.no_grad()
def _make(
    operands: Operands, name: BackendName, shape: AttentionShape, direction: Direction
) -> Call:
    operands.begin()
    of, size = DTYPES[shape.dtype], shape.head_size
    q, do = (operands.take(shape.queries, shape.heads.queries, size, dtype=of) for _ in range(2))
    keys = (shape.keys, shape.heads.kv, size)
    k, v = (operands.take_keys(*keys, dtype=of) for _ in range(2))
    if direction == "forward":
        return lambda: attention_forward(q, k, v, backend=name)
    o, lse = attention_forward(q, k, v, backend=name)
    dk, dv = (
        empty_keys(*keys, dtype=torch.float32, device=operands.device).zero_() for _ in range(2)
    )
    return lambda: attention_backward(do, q, k, v, o, lse, dk_TKD=dk, dv_TKD=dv, backend=name)
