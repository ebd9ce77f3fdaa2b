"""Timing of attention forward and backward as the engine calls them, on a grid, per back end.

The backward adds to fp32 gradients of all keys, as in training. The back end that ``auto`` chooses
is timed on all shapes; other back ends only on shapes for which a call does not take too long, as
predicted from shorter calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch

from sppo.bench.attention_backends import (
    BackendComparison,
    BackendRate,
    LeftOut,
    backends_to_try,
    failure,
    why_not_timed,
)
from sppo.bench.attention_grid import AttentionGrid, AttentionShape
from sppo.bench.operands import DTYPES, Operands
from sppo.bench.timing import Call, Rounds, TimedCase, Timing, Watcher, time_cases, time_once
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


def measure_attention(
    operands: Operands,
    grid: AttentionGrid,
    *,
    dtypes: Sequence[str],
    rounds: Rounds,
    watcher: Watcher,
) -> tuple[Mapping[AttentionKey, Timing], BackendComparison]:
    """Time back ends on spans at the end of prefixes, all cases in every round.

    Args:
        operands: Operands on the device.
        grid: Spans and back ends to time; at least one back end supports a problem of the grid.
        dtypes: Some of bf16 and fp32.
        rounds: Number and length of the rounds.
        watcher: Receiver of the progress, notified of every timing.

    Returns:
        The timings, and the rates of each back end and shape.
    """
    chosen: list[tuple[BackendName, AttentionShape]] = []
    left_out: list[LeftOut] = []
    automatic: dict[AttentionShape, BackendName] = {}
    for shapes in grid.problems(dtypes):
        taken = chosen_name("auto", shapes[0].case(operands.device))
        timed, not_timed = _choose(operands, grid, shapes, taken)
        chosen += timed
        left_out += not_timed
        automatic |= dict.fromkeys(dict.fromkeys(shape for _, shape in timed), taken)
    directions: tuple[Direction, ...] = ("forward", "backward")
    cases: list[TimedCase[AttentionKey]] = [
        TimedCase((name, shape, direction), partial(_make, operands, name, shape, direction))
        for name, shape in chosen
        for direction in directions
    ]
    watcher.begin("attention", total=len(cases) * rounds.count)
    timings = time_cases(cases, rounds=rounds, watcher=watcher)
    rates = tuple(
        _rate(name, shape, timings[name, shape, "forward"], timings[name, shape, "backward"])
        for name, shape in chosen
    )
    return timings, BackendComparison(rates, automatic, tuple(left_out))


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


def _choose(
    operands: Operands, grid: AttentionGrid, shapes: list[AttentionShape], taken: BackendName
) -> tuple[list[tuple[BackendName, AttentionShape]], list[LeftOut]]:
    """Return the (back end, shape) pairs of one problem to time, and those to leave out.

    Args:
        operands: Operands on the device.
        grid: Grid that the shapes belong to.
        shapes: Shapes that differ in length only, so that a back end supports all or none.
        taken: Back end that ``auto`` chooses.
    """
    case = shapes[0].case(operands.device)
    names = backends_to_try(grid, device=operands.device)
    reasons = {name: why_not_timed(name, case) for name in names}
    able = [name for name in names if reasons[name] is None]
    first = taken if taken in able else next(iter(able), None)
    if first is not None and not grid.fixed:
        shapes = _shorter(operands, first, shapes)
    longest_s = _LONGEST_ASKED_S if grid.fixed else _LONGEST_S[operands.device]
    timed: list[tuple[BackendName, AttentionShape]] = []
    left_out: list[LeftOut] = []
    for name in names:
        gaps = dict.fromkeys(shapes, reasons[name])
        if reasons[name] is None and name != first:
            gaps = _gaps(operands, name, shapes, longest_s)
        timed += [(name, shape) for shape, reason in gaps.items() if reason is None]
        left_out += [LeftOut(name, shape, why) for shape, why in gaps.items() if why is not None]
    return timed, left_out


def _gaps(
    operands: Operands, name: BackendName, shapes: list[AttentionShape], longest_s: float
) -> dict[AttentionShape, str | None]:
    """Return by shape why a back end is not timed, None if it is; for all but ``auto``'s choice.

    A package may compute a small case correctly and fail on a larger one: only that shape of that
    back end is left out.
    """
    gaps: dict[AttentionShape, str | None] = dict.fromkeys(shapes)
    try:
        in_time = _in_time(operands, name, shapes, longest_s)
    except Exception as error:  # third-party packages may raise anything
        return dict.fromkeys(shapes, failure(error))
    for shape in shapes:
        if shape not in in_time:
            gaps[shape] = f"would take longer than {longest_s:g} s a call"
            continue
        try:
            time_once(_make(operands, name, shape, "backward"), device=operands.device)
        except Exception as error:  # as above
            gaps[shape] = failure(error)
    return gaps


def _shorter(
    operands: Operands, name: BackendName, shapes: list[AttentionShape]
) -> list[AttentionShape]:
    """Return ``shapes`` without those whose queries take too long; keep two numbers of queries."""
    queries = sorted({shape.queries for shape in shapes})
    probe = max((shape for shape in shapes if shape.queries == queries[0]), key=lambda s: s.keys)
    seconds = _probe(operands, name, probe)
    while len(queries) > 2 and seconds * (queries[-1] / probe.queries) ** 2 > _LONGEST_AUTOMATIC_S:
        queries.pop()
    return [shape for shape in shapes if shape.queries in queries]


def _in_time(
    operands: Operands, name: BackendName, shapes: list[AttentionShape], longest_s: float
) -> list[AttentionShape]:
    """Return the shapes whose backward is predicted to take at most ``longest_s``.

    Predictions come from shorter shapes, which need more time per FLOP than long ones. So before a
    shape is left out, a part of its queries is timed that should take a quarter of ``longest_s``.
    """
    most = _FIRST_PROBE[operands.device]
    rising = sorted(shapes, key=lambda shape: shape.forward_flops)
    tried = replace(rising[0], queries=min(rising[0].queries, most), keys=min(rising[0].keys, most))
    s_per_flop = _probe(operands, name, tried) / tried.forward_flops
    for count, shape in enumerate(rising):
        foretold_s = s_per_flop * shape.forward_flops
        if foretold_s > longest_s:
            some = max(1, int(shape.queries * longest_s / (4 * foretold_s)))
            tried = replace(shape, queries=some)
            s_per_flop = _probe(operands, name, tried) / tried.forward_flops
        if s_per_flop * shape.forward_flops > longest_s:
            return rising[:count]
    return rising


def _probe(operands: Operands, name: BackendName, shape: AttentionShape) -> float:
    """Return the seconds of one warm backward."""
    return time_once(_make(operands, name, shape, "backward"), device=operands.device)


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
