"""Timing of attention over many short documents, which a CPU computes one by one.

A call of a few tokens takes as long as its calls of torch, whatever it computes. The rates of
:mod:`sppo.bench.attention` are those of hundreds of tokens and do not show this.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from sppo.bench.operands import DTYPES, Operands
from sppo.bench.timing import Call, KernelBench, TimedCase
from sppo.kernels.attention.interface import attention_backward, attention_forward
from sppo.kernels.attention.kv_layout import empty_keys

Direction = Literal["forward", "backward"]
DocumentKey = tuple[str, Direction]
_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

_DOCUMENTS = 64
_TOKENS = 8
"""Tokens of each document: few enough for their products to take no time."""
_HEADS, _HEAD_SIZE = 2, 64


@dataclass(frozen=True, slots=True)
class DocumentSeconds:
    """Seconds that each short document adds to an attention call.

    Attributes:
        forward_s: Seconds per document and forward.
        backward_s: Seconds per document and backward.
    """

    forward_s: float
    backward_s: float


def measure_documents(bench: KernelBench) -> DocumentSeconds:
    """Time attention over short documents, on a CPU; the slowest dtype counts."""
    cases: list[TimedCase[DocumentKey]] = [
        TimedCase((dtype, direction), partial(_make, bench.operands, dtype, direction))
        for dtype in bench.dtypes
        for direction in _DIRECTIONS
    ]
    timings = bench.time("documents", cases)
    forward_s, backward_s = (
        max(timings[dtype, direction].median_s for dtype in bench.dtypes) / _DOCUMENTS
        for direction in _DIRECTIONS
    )
    return DocumentSeconds(forward_s, backward_s)


@torch.no_grad()
def _make(operands: Operands, dtype: str, direction: Direction) -> Call:
    operands.begin()
    of, tokens = DTYPES[dtype], _DOCUMENTS * _TOKENS
    starts = tuple(range(0, tokens, _TOKENS))
    q, do = (operands.take(tokens, _HEADS, _HEAD_SIZE, dtype=of) for _ in range(2))
    k, v = (operands.take_keys(tokens, _HEADS, _HEAD_SIZE, dtype=of) for _ in range(2))
    if direction == "forward":
        return lambda: attention_forward(q, k, v, document_starts=starts)
    o, lse = attention_forward(q, k, v, document_starts=starts)
    dk, dv = (
        empty_keys(tokens, _HEADS, _HEAD_SIZE, dtype=torch.float32, device=operands.device).zero_()
        for _ in range(2)
    )
    return lambda: attention_backward(
        do, q, k, v, o, lse, dk_TKD=dk, dv_TKD=dv, document_starts=starts
    )
