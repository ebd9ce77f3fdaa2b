"""Timing of attention forward and backward as the engine calls them, on a grid, per back end.

The backward adds to fp32 gradients of all keys, as in training. The back end that ``auto`` chooses
is timed on all shapes; other back ends only on shapes for which a call does not take too long, as
predicted from a call of fewer queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import torch

from sppo.bench.attention_backends import (
    BACKENDS,
    BackendComparison,
    BackendRate,
    BackendShape,
    why_not_timed,
)
from sppo.bench.attention_grid import AttentionGrid, AttentionShape, Heads
from sppo.bench.operands import DTYPES, Operands
from sppo.bench.timing import Call, KernelBench
from sppo.hardware.rates import AttentionPoint
from sppo.kernels.attention.call import AttentionCall
from sppo.kernels.attention.choice import CAPABILITIES, BackendName, chosen_name
from sppo.kernels.attention.interface import Backend, attention_backward, attention_forward
from sppo.kernels.attention.kv_layout import empty_keys

Direction = Literal["forward", "backward"]

_MOST_TRIED = {"cpu": 256, "cuda": 1024}
"""Most queries of the call that estimates the speed of a back end."""
_LONGEST_S = {"cpu": 0.2, "cuda": 0.05}
"""Most seconds of a call of a back end that ``auto`` does not choose."""
_LONGEST_AUTOMATIC_S = 0.4
_DOCUMENTS, _DOCUMENT_TOKENS = 64, 8
"""Short documents of one call, and tokens of each: too few for their products to take time."""


@dataclass(frozen=True, slots=True)
class DocumentSeconds:
    """Seconds that each short document adds to an attention call.

    Attributes:
        forward_s: Seconds per document and forward.
        backward_s: Seconds per document and backward.
    """

    forward_s: float
    backward_s: float


def measure_attention(bench: KernelBench, grid: AttentionGrid) -> BackendComparison:
    """Time back ends on spans at the end of prefixes, all cases in every round.

    At least one back end must support a problem of the grid.
    """
    reasons: dict[BackendShape, str | None] = {}
    automatic: dict[AttentionShape, BackendName] = {}
    for shapes in grid.problems(bench.dtypes):
        taken = chosen_name("auto", shapes[0].case(bench.operands.device))
        found = _why_left_out(bench, shapes, taken)
        reasons |= found
        automatic |= {shape: taken for (_, shape), reason in found.items() if reason is None}
    chosen = [pair for pair, reason in reasons.items() if reason is None]
    timings = bench.time(
        "attention",
        {
            (name, shape, way): partial(_make, bench.operands, name, shape, way)
            for name, shape in chosen
            for way in get_args(Direction)
        },
    )
    rates = []
    for name, shape in chosen:
        forward, backward = (timings[name, shape, way] for way in get_args(Direction))
        spread = max(forward.spread, backward.spread)
        rates.append(BackendRate(name, shape, forward.median_s, backward.median_s, spread))
    left_out = {pair: reason for pair, reason in reasons.items() if reason is not None}
    return BackendComparison(tuple(rates), automatic, left_out)


def measure_documents(bench: KernelBench) -> DocumentSeconds:
    """Time attention over short documents, which a CPU computes one by one.

    A call of a few tokens takes as long as its calls of torch, whatever it computes, which rates of
    hundreds of tokens do not show. The slowest dtype counts.
    """
    tokens = _DOCUMENTS * _DOCUMENT_TOKENS
    shapes = [AttentionShape(dtype, tokens, tokens, Heads(2, 2), 64) for dtype in bench.dtypes]
    starts = tuple(range(0, tokens, _DOCUMENT_TOKENS))
    timings = bench.time(
        "documents",
        {
            (shape, way): partial(_make, bench.operands, "auto", shape, way, starts)
            for shape in shapes
            for way in get_args(Direction)
        },
    )
    forward_s, backward_s = (
        max(timings[shape, way].median_s for shape in shapes) / _DOCUMENTS
        for way in get_args(Direction)
    )
    return DocumentSeconds(forward_s, backward_s)


def attention_points(comparison: BackendComparison) -> tuple[AttentionPoint, ...]:
    """Return the rates of the back end that ``auto`` chooses, where it was timed, for plans."""
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
        if (taken := comparison.automatic[shape]) in rates
    )


def _why_left_out(
    bench: KernelBench, shapes: list[AttentionShape], taken: BackendName
) -> dict[BackendShape, str | None]:
    """Return by back end and shape of one problem why it is not timed; None if it is.

    Args:
        bench: What all measurements share.
        shapes: Shapes that differ in length only, so that a back end supports all or none.
        taken: Back end that ``auto`` chooses.
    """
    device = bench.operands.device
    case = shapes[0].case(device)
    reasons = {
        name: why_not_timed(name, case) for name in BACKENDS if device in CAPABILITIES[name].devices
    }
    able = [name for name, reason in reasons.items() if reason is None]
    first = taken if taken in able else next(iter(able), None)
    if first is not None:
        shapes = _shorter(bench, first, shapes)
    longest_s = _LONGEST_S[device]
    return {
        (name, shape): _gap(bench, name, shape, longest_s)
        if reason is None and name != first
        else reason
        for name, reason in reasons.items()
        for shape in shapes
    }


def _shorter(
    bench: KernelBench, name: BackendName, shapes: list[AttentionShape]
) -> list[AttentionShape]:
    """Return ``shapes`` without those whose queries take too long; keep two numbers of queries."""
    queries = sorted({shape.queries for shape in shapes})
    tried = max((shape for shape in shapes if shape.queries == queries[0]), key=lambda s: s.keys)
    seconds = _try(bench, name, tried)
    while len(queries) > 2 and seconds * (queries[-1] / tried.queries) ** 2 > _LONGEST_AUTOMATIC_S:
        queries.pop()
    return [shape for shape in shapes if shape.queries in queries]


def _gap(
    bench: KernelBench, name: BackendName, shape: AttentionShape, longest_s: float
) -> str | None:
    """Return why a back end is not timed on one shape, None if it is; not for ``auto``'s choice.

    A call of few queries predicts the time, with more seconds per FLOP than one of many. A package
    may compute a small case correctly and fail on a larger one, so that is tried, too.
    """
    few = replace(shape, queries=min(shape.queries, _MOST_TRIED[bench.operands.device]))
    try:
        s_per_flop = _try(bench, name, few) / few.forward_flops
        if s_per_flop * shape.forward_flops > longest_s:
            return f"would take longer than {longest_s:g} s a call"
        if few != shape:
            _try(bench, name, shape)
    except Exception as error:  # third-party packages may raise anything
        first_line = (str(error).splitlines() or [""])[0]
        return f"fails with {type(error).__name__}: {first_line}"
    return None


def _try(bench: KernelBench, name: BackendName, shape: AttentionShape) -> float:
    """Return the seconds of one warm backward."""
    return bench.time_once(_make(bench.operands, name, shape, "backward"))


@torch.no_grad()
def _make(
    operands: Operands,
    name: Backend,
    shape: AttentionShape,
    direction: Direction,
    starts: tuple[int, ...] = (0,),
) -> Call:
    """Return one call of a back end on documents that begin at ``starts``."""
    operands.begin()
    of, size = DTYPES[shape.dtype], shape.head_size
    q, do = (operands.take(shape.queries, shape.heads.queries, size, dtype=of) for _ in range(2))
    keys = (shape.keys, shape.heads.kv, size)
    k, v = (operands.take_keys(*keys, dtype=of) for _ in range(2))
    call = AttentionCall(q, k, v, document_starts=starts)
    forward = partial(attention_forward, call, name)
    if direction == "forward":
        return forward
    o, lse = forward()
    dk, dv = (
        empty_keys(*keys, dtype=torch.float32, device=operands.device).zero_() for _ in range(2)
    )
    return lambda: attention_backward(call, do, o, lse, dk_TKD=dk, dv_TKD=dv, backend=name)
