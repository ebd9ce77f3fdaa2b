"""Attention back ends side by side at one shape: what the rule that chooses among them is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from sppo.bench.operands import Operands
from sppo.bench.timing import Call, Case, Rounds, Timing, Watcher, time_cases
from sppo.kernels.attention import attention_backward, attention_forward
from sppo.kernels.attention_choice import (
    CAPABILITIES,
    AttentionCase,
    Name,
    error_on_a_small_case,
    why_not,
)

Direction = Literal["forward", "backward"]
BackendKey = tuple[Name, Direction]


@dataclass(frozen=True, slots=True)
class Span:
    """A span of queries at the end of a prefix, in bf16."""

    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_size: int


SPAN = Span(queries=4096, keys=32768, heads=32, kv_heads=8, head_size=128)


def measure_backends(
    operands: Operands, *, rounds: Rounds, watcher: Watcher, span: Span = SPAN
) -> Mapping[BackendKey, Timing]:
    """Time every back end that can do ``span`` on this device and gets a small case right."""
    case = AttentionCase(
        operands.take(1, dtype=torch.bfloat16).device,
        torch.bfloat16,
        span.head_size,
        span.heads // span.kv_heads,
        window=False,
    )
    names = [name for name in CAPABILITIES if _can(name, case)]
    directions: tuple[Direction, ...] = ("forward", "backward")
    cases: list[Case[BackendKey]] = [
        Case((name, direction), partial(_make, operands, span, name, direction))
        for name in names
        for direction in directions
    ]
    watcher.begin("attention back ends", total=len(cases) * rounds.count)
    return time_cases(cases, rounds=rounds, watcher=watcher)


def _can(name: Name, case: AttentionCase) -> bool:
    """The definition is left out: its memory is that of all scores."""
    able = CAPABILITIES[name].automatic and why_not(name, case) is None
    return able and error_on_a_small_case(name, case) is None


@torch.no_grad()
def _make(operands: Operands, span: Span, name: Name, direction: Direction) -> Call:
    operands.begin()
    bf16 = torch.bfloat16
    q, do = (operands.take(span.queries, span.heads, span.head_size, dtype=bf16) for _ in range(2))
    k, v = (operands.take(span.keys, span.kv_heads, span.head_size, dtype=bf16) for _ in range(2))
    if direction == "forward":
        return lambda: attention_forward(q, k, v, backend=name)
    o, lse = attention_forward(q, k, v, backend=name)
    dk, dv = (operands.zeros(*k.shape, dtype=torch.float32) for _ in range(2))
    return lambda: attention_backward(do, q, k, v, o, lse, dk_TKD=dk, dv_TKD=dv, backend=name)
