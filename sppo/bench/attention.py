"""Timing of attention forward and backward as the engine calls them, on a grid of shapes.

The back end is the one that ``auto`` chooses, as in training, where the backward also adds to fp32
gradients of all keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal, NamedTuple, get_args

import torch

from sppo.bench.operands import DTYPES, Operands
from sppo.bench.timing import Call, KernelBench, Timing
from sppo.config.model import ModelConfig
from sppo.cost.flops import FLASH_BACKWARD_RATIO, causal_pairs
from sppo.hardware.rates import AttentionPoint
from sppo.kernels.attention.call import AttentionCall
from sppo.kernels.attention.choice import AttentionCase, BackendName, chosen_name
from sppo.kernels.attention.interface import attention_backward, attention_forward
from sppo.kernels.attention.kv_layout import empty_keys

Direction = Literal["forward", "backward"]

_QUERIES = {"cpu": (256, 1024), "cuda": (1024, 4096, 16384)}
_PREFIXES = (1, 2, 4, 8)
"""Ratios of keys to queries."""
_HEAD_SIZES = (64, 128)
_QUICK_QUERIES = {"cpu": (256, 512), "cuda": (2048, 8192)}
_QUICK_PREFIXES = (1, 4)
_QUICK_HEAD_SIZES = (64,)
_LONGEST_S = 0.4
"""Most seconds of a call."""
_DOCUMENTS, _DOCUMENT_TOKENS = 64, 8
"""Short documents of one call, and tokens of each: too few for their products to take time."""


class Heads(NamedTuple):
    """Numbers of query heads and of key/value heads of one attention."""

    queries: int
    kv: int
    """Number of key/value heads, a divisor of the number of query heads."""

    def __str__(self) -> str:
        return str(self.queries) if self.queries == self.kv else f"{self.queries}/{self.kv}"


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Shape of one attention call, whose ``queries`` are the last of ``keys`` positions."""

    dtype: str
    queries: int
    keys: int
    heads: Heads
    head_size: int

    @property
    def forward_flops(self) -> int:
        """FLOPs of the forward, over visible pairs."""
        pairs = causal_pairs(self.keys - self.queries, self.keys)
        return 4 * self.heads.queries * self.head_size * pairs

    def case(self, device: str) -> AttentionCase:
        """Return the case that a back end must support to compute this shape on ``device``."""
        group = self.heads.queries // self.heads.kv
        where = torch.device(device)
        return AttentionCase(where, DTYPES[self.dtype], self.head_size, group, window=False)


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


def attention_problems(
    device: str, dtypes: Sequence[str], *, quick: bool, model: ModelConfig | None = None
) -> list[list[AttentionShape]]:
    """Return the shapes to time on a device: a list of lengths for each dtype and head size.

    They have the heads of a model, or else common ones. A CPU is slow, so its common number of
    heads is the smallest that keeps all threads busy, at least two.
    """
    threads = max(2, torch.get_num_threads())
    heads = Heads(32, 8) if device == "cuda" else Heads(threads, threads)
    sizes = _QUICK_HEAD_SIZES if quick else _HEAD_SIZES
    if model is not None:
        heads, sizes = Heads(model.num_heads, model.kv_heads), (model.head_dim,)
    spans = (_QUICK_QUERIES if quick else _QUERIES)[device]
    prefixes = _QUICK_PREFIXES if quick else _PREFIXES
    return [
        [
            AttentionShape(dtype, queries, prefix * queries, heads, size)
            for queries in spans
            for prefix in prefixes
        ]
        for dtype, size in product(dtypes, sizes)
    ]


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
            (shape.dtype, shape.head_size): chosen_name(shape.case(bench.operands.device))
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
