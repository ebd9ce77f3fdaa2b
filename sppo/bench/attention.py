"""Attention forward and backward as the engine calls them, on a grid, with every back end.

The backward adds to fp32 gradients of all keys, as it does in training. The back end that ``auto``
takes is timed everywhere; another one where a call of it does not take too long, which is foretold
from shorter ones.
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
from sppo.bench.attention_grid import AttentionGrid, Span
from sppo.bench.operands import DTYPES, Operands
from sppo.bench.timing import Call, Case, Rounds, Timing, Watcher, time_cases, time_once
from sppo.hardware.rates import AttentionPoint
from sppo.kernels.attention.choice import Name, chosen_name
from sppo.kernels.attention.interface import attention_backward, attention_forward
from sppo.kernels.attention.kv_layout import empty_keys

Direction = Literal["forward", "backward"]
AttentionKey = tuple[Name, Span, Direction]

_FIRST_PROBE = {"cpu": 256, "cuda": 1024}
"""Most queries and keys of the first call that says how slow a back end is."""
_LONGEST_S = {"cpu": 0.2, "cuda": 0.05}
"""Of a call of a back end that ``auto`` does not take."""
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
    """Time back ends on spans at the end of prefixes, all of them in every round.

    Args:
        operands: of the device.
        grid: which spans, and which back ends; one of these can do a problem of the grid.
        dtypes: of bf16, fp32.
        rounds: how thoroughly.
        watcher: is told of every timing.

    Returns:
        The timings, and what follows from them for each back end and span.
    """
    chosen: list[tuple[Name, Span]] = []
    left_out: list[LeftOut] = []
    automatic: dict[Span, Name] = {}
    for spans in grid.problems(dtypes):
        taken = chosen_name("auto", spans[0].case(operands.device))
        timed, not_timed = _choose(operands, grid, spans, taken)
        chosen += timed
        left_out += not_timed
        automatic |= dict.fromkeys(dict.fromkeys(span for _, span in timed), taken)
    directions: tuple[Direction, ...] = ("forward", "backward")
    cases: list[Case[AttentionKey]] = [
        Case((name, span, direction), partial(_make, operands, name, span, direction))
        for name, span in chosen
        for direction in directions
    ]
    watcher.begin("attention", total=len(cases) * rounds.count)
    timings = time_cases(cases, rounds=rounds, watcher=watcher)
    rates = tuple(
        _rate(name, span, timings[name, span, "forward"], timings[name, span, "backward"])
        for name, span in chosen
    )
    return timings, BackendComparison(rates, automatic, tuple(left_out))


def attention_points(
    comparison: BackendComparison, grid: AttentionGrid
) -> tuple[AttentionPoint, ...]:
    """Rates for plans: of the back end that ``auto`` takes, with the first heads of the grid.

    Empty where the grid, or what was timed of it, is none that plans can read.
    """
    if not grid.for_plans:
        return ()
    return tuple(
        AttentionPoint(
            span.dtype,
            span.head_size,
            span.queries,
            span.keys,
            rates[taken].forward_flops_per_s,
            rates[taken].backward_flops_per_s,
        )
        for span, rates in comparison.by_span.items()
        if span.heads == grid.heads[0] and (taken := comparison.automatic[span]) in rates
    )


def _choose(
    operands: Operands, grid: AttentionGrid, spans: list[Span], taken: Name
) -> tuple[list[tuple[Name, Span]], list[LeftOut]]:
    """What to time of the spans of one problem, and what not.

    Args:
        operands: of the device.
        grid: that the spans are of.
        spans: alike but for their length, so that a back end can do all or none.
        taken: by ``auto``.
    """
    case = spans[0].case(operands.device)
    names = backends_to_try(grid, device=operands.device)
    reasons = {name: why_not_timed(name, case) for name in names}
    able = [name for name in names if reasons[name] is None]
    first = taken if taken in able else next(iter(able), None)
    if first is not None and not grid.fixed:
        spans = _shorter(operands, first, spans)
    longest_s = _LONGEST_ASKED_S if grid.fixed else _LONGEST_S[operands.device]
    timed: list[tuple[Name, Span]] = []
    left_out: list[LeftOut] = []
    for name in names:
        gaps = dict.fromkeys(spans, reasons[name])
        if reasons[name] is None and name != first:
            gaps = _gaps(operands, name, spans, longest_s)
        timed += [(name, span) for span, reason in gaps.items() if reason is None]
        left_out += [LeftOut(name, span, why) for span, why in gaps.items() if why is not None]
    return timed, left_out


def _gaps(
    operands: Operands, name: Name, spans: list[Span], longest_s: float
) -> dict[Span, str | None]:
    """Why a back end that ``auto`` does not take is not timed on each span; None where it is.

    A package may get a small case right and fail on a larger one: that costs its own place only.
    """
    gaps: dict[Span, str | None] = dict.fromkeys(spans)
    try:
        in_time = _in_time(operands, name, spans, longest_s)
    except Exception as error:  # whatever other people's packages raise
        return dict.fromkeys(spans, failure(error))
    for span in spans:
        if span not in in_time:
            gaps[span] = f"would take longer than {longest_s:g} s a call"
            continue
        try:
            time_once(_make(operands, name, span, "backward"), device=operands.device)
        except Exception as error:  # as above
            gaps[span] = failure(error)
    return gaps


def _shorter(operands: Operands, name: Name, spans: list[Span]) -> list[Span]:
    """Without the most queries while these take too long; two numbers of queries stay."""
    queries = sorted({span.queries for span in spans})
    probe = max((span for span in spans if span.queries == queries[0]), key=lambda s: s.keys)
    seconds = _probe(operands, name, probe)
    while len(queries) > 2 and seconds * (queries[-1] / probe.queries) ** 2 > _LONGEST_AUTOMATIC_S:
        queries.pop()
    return [span for span in spans if span.queries in queries]


def _in_time(operands: Operands, name: Name, spans: list[Span], longest_s: float) -> list[Span]:
    """Spans whose backward takes no longer than ``longest_s``, foretold from shorter ones.

    A short span is slower for its FLOPs than a long one. So before one is left out, as many of its
    queries are tried as should take a quarter of that time.
    """
    most = _FIRST_PROBE[operands.device]
    rising = sorted(spans, key=lambda span: span.forward_flops)
    tried = replace(rising[0], queries=min(rising[0].queries, most), keys=min(rising[0].keys, most))
    s_per_flop = _probe(operands, name, tried) / tried.forward_flops
    for count, span in enumerate(rising):
        foretold_s = s_per_flop * span.forward_flops
        if foretold_s > longest_s:
            some = max(1, int(span.queries * longest_s / (4 * foretold_s)))
            tried = replace(span, queries=some)
            s_per_flop = _probe(operands, name, tried) / tried.forward_flops
        if s_per_flop * span.forward_flops > longest_s:
            return rising[:count]
    return rising


def _probe(operands: Operands, name: Name, span: Span) -> float:
    """Seconds of one warm backward."""
    return time_once(_make(operands, name, span, "backward"), device=operands.device)


def _rate(name: Name, span: Span, forward: Timing, backward: Timing) -> BackendRate:
    spread = max(forward.spread, backward.spread)
    return BackendRate(name, span, forward.median_s, backward.median_s, spread)


@torch.no_grad()
def _make(operands: Operands, name: Name, span: Span, direction: Direction) -> Call:
    operands.begin()
    of, size = DTYPES[span.dtype], span.head_size
    q, do = (operands.take(span.queries, span.heads.queries, size, dtype=of) for _ in range(2))
    keys = (span.keys, span.heads.kv, size)
    k, v = (operands.take_keys(*keys, dtype=of) for _ in range(2))
    if direction == "forward":
        return lambda: attention_forward(q, k, v, backend=name)
    o, lse = attention_forward(q, k, v, backend=name)
    dk, dv = (
        empty_keys(*keys, dtype=torch.float32, device=operands.device).zero_() for _ in range(2)
    )
    return lambda: attention_backward(do, q, k, v, o, lse, dk_TKD=dk, dv_TKD=dv, backend=name)
