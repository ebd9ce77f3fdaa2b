"""Timing of attention forward and backward as the engine calls them, on a grid of shapes.

The back end is the one that ``auto`` chooses, as in training, where the backward also adds to fp32
gradients of all keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch

from sppo.bench.attention_grid import AttentionShape, Heads
from sppo.bench.operands import DTYPES, Operands
from sppo.bench.timing import Call, KernelBench, Timing
from sppo.cost.flops import FLASH_BACKWARD_RATIO
from sppo.hardware.rates import AttentionPoint
from sppo.kernels.attention.call import AttentionCall
from sppo.kernels.attention.choice import BackendName, chosen_name
from sppo.kernels.attention.interface import attention_backward, attention_forward
from sppo.kernels.attention.kv_layout import empty_keys

Direction = Literal["forward", "backward"]

_LONGEST_S = 0.4
"""Most seconds of a call."""
_DOCUMENTS, _DOCUMENT_TOKENS = 64, 8
"""Short documents of one call, and tokens of each: too few for their products to take time."""


@dataclass(frozen=True, slots=True)
class AttentionRates:
    """Rates of attention on spans at the end of prefixes.

    Attributes:
        heads: Numbers of heads of all spans.
        backends: Back end that was timed, by dtype and head size.
        points: Rates over visible pairs.
    """

    heads: Heads
    backends: Mapping[tuple[str, int], BackendName]
    points: tuple[AttentionPoint, ...]


@dataclass(frozen=True, slots=True)
class DocumentSeconds:
    """Seconds that each short document adds to an attention call.

    Attributes:
        forward_s: Seconds per document and forward.
        backward_s: Seconds per document and backward.
    """

    forward_s: float
    backward_s: float


def measure_attention(
    bench: KernelBench, problems: Sequence[Sequence[AttentionShape]]
) -> AttentionRates:
    """Time spans at the end of prefixes, all of them in every round.

    Args:
        bench: What all measurements share.
        problems: Lists of shapes that differ in length only.
    """
    shapes = [shape for problem in problems for shape in _shorter(bench, problem)]
    cases = {
        (shape, way): partial(_make, bench.operands, shape, way)
        for shape in shapes
        for way in get_args(Direction)
    }
    return AttentionRates(
        shapes[0].heads,
        {
            (shape.dtype, shape.head_size): chosen_name("auto", shape.case(bench.operands.device))
            for shape in shapes
        },
        attention_points(bench.time("attention", cases)),
    )


def attention_points(
    timings: Mapping[tuple[AttentionShape, Direction], Timing],
) -> tuple[AttentionPoint, ...]:
    """Return the rates of each shape from the times of its forward and its backward."""
    points = []
    for shape in dict.fromkeys(shape for shape, _ in timings):
        forward, backward = (timings[shape, way].median_s for way in get_args(Direction))
        rates = shape.forward_flops / forward, FLASH_BACKWARD_RATIO * shape.forward_flops / backward
        points.append(
            AttentionPoint(shape.dtype, shape.head_size, shape.queries, shape.keys, *rates)
        )
    return tuple(points)


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
            (shape, way): partial(_make, bench.operands, shape, way, starts)
            for shape in shapes
            for way in get_args(Direction)
        },
    )
    forward_s, backward_s = (
        max(timings[shape, way].median_s for shape in shapes) / _DOCUMENTS
        for way in get_args(Direction)
    )
    return DocumentSeconds(forward_s, backward_s)


def _shorter(bench: KernelBench, shapes: Sequence[AttentionShape]) -> list[AttentionShape]:
    """Return ``shapes`` without those whose queries take too long; keep two numbers of queries."""
    queries = sorted({shape.queries for shape in shapes})
    tried = max((shape for shape in shapes if shape.queries == queries[0]), key=lambda s: s.keys)
    seconds = bench.time_once(_make(bench.operands, tried, "backward"))
    while len(queries) > 2 and seconds * (queries[-1] / tried.queries) ** 2 > _LONGEST_S:
        queries.pop()
    return [shape for shape in shapes if shape.queries in queries]


@torch.no_grad()
def _make(
    operands: Operands,
    shape: AttentionShape,
    direction: Direction,
    starts: tuple[int, ...] = (0,),
) -> Call:
    """Return one call on documents that begin at ``starts``."""
    operands.begin()
    of, size = DTYPES[shape.dtype], shape.head_size
    q, do = (operands.take(shape.queries, shape.heads.queries, size, dtype=of) for _ in range(2))
    keys = (shape.keys, shape.heads.kv, size)
    k, v = (operands.take_keys(*keys, dtype=of) for _ in range(2))
    call = AttentionCall(q, k, v, document_starts=starts)
    if direction == "forward":
        return partial(attention_forward, call)
    o, lse = attention_forward(call)
    dk, dv = (
        empty_keys(*keys, dtype=torch.float32, device=operands.device).zero_() for _ in range(2)
    )
    return lambda: attention_backward(call, do, o, lse, dk_TKD=dk, dv_TKD=dv)
