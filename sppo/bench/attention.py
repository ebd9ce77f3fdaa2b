"""Attention forward and backward as the engine calls them, on a grid of queries and prefixes.

The backward adds to fp32 gradients of all keys, as it does in training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Literal

import torch

from sppo.bench.operands import DTYPES, Operands
from sppo.bench.timing import Call, Case, Rounds, Timing, Watcher, time_cases, time_once
from sppo.kernels.attention import attention_backward, attention_forward
from sppo.planning.flops import FLASH_BACKWARD_RATIO, causal_pairs
from sppo.planning.rates import AttentionPoint

Direction = Literal["forward", "backward"]
AttentionKey = tuple[str, int, int, int, Direction]
"""(dtype, head size, queries, keys, direction)."""

_QUERIES = {"cpu": (256, 1024), "cuda": (1024, 4096, 16384)}
_PREFIXES = (1, 2, 4, 8)
"""Keys of a span relative to its queries."""
_HEAD_SIZES = (64, 128)
_CUDA_HEADS = (32, 8)
_QUICK_QUERIES = {"cpu": (256, 512), "cuda": (2048, 8192)}
_QUICK_PREFIXES = (1, 4)
_QUICK_HEAD_SIZES = (64,)
_LONGEST_S = 0.4


def measure_attention(
    operands: Operands,
    *,
    dtypes: Sequence[str],
    rounds: Rounds,
    watcher: Watcher,
    quick: bool = False,
) -> tuple[Mapping[AttentionKey, Timing], tuple[AttentionPoint, ...]]:
    """Time spans at the end of prefixes of several lengths; a slow device gets shorter spans."""
    sizes = _QUICK_HEAD_SIZES if quick else _HEAD_SIZES
    cases = [
        case
        for dtype in dtypes
        for size in sizes
        for case in _cases(operands, dtype=dtype, head_size=size, quick=quick)
    ]
    watcher.begin("attention", total=len(cases) * rounds.count)
    timings = time_cases(cases, rounds=rounds, watcher=watcher)
    heads, _ = _heads(operands.device)
    return timings, attention_points(timings, heads=heads)


def attention_points(
    timings: Mapping[AttentionKey, Timing], *, heads: int
) -> tuple[AttentionPoint, ...]:
    """Rates over visible pairs from the times of both directions."""
    points = []
    for dtype, head_size, queries, keys in dict.fromkeys(key[:4] for key in timings):
        flops = 4 * heads * head_size * causal_pairs(keys - queries, keys)
        place = (dtype, head_size, queries, keys)
        forward = flops / timings[*place, "forward"].median_s
        backward = FLASH_BACKWARD_RATIO * flops / timings[*place, "backward"].median_s
        points.append(AttentionPoint(*place, forward, backward))
    return tuple(points)


def _cases(
    operands: Operands, *, dtype: str, head_size: int, quick: bool
) -> Iterator[Case[AttentionKey]]:
    device = operands.device
    all_queries: tuple[int, ...] = (_QUICK_QUERIES if quick else _QUERIES)[device]
    prefixes = _QUICK_PREFIXES if quick else _PREFIXES
    probe = all_queries[0]
    seconds = time_once(
        _make(operands, dtype, head_size, probe, prefixes[-1] * probe, "backward"), device=device
    )
    while len(all_queries) > 2 and seconds * (all_queries[-1] / probe) ** 2 > _LONGEST_S:
        all_queries = all_queries[:-1]
    for queries in all_queries:
        for prefix in prefixes:
            for direction in ("forward", "backward"):
                key: AttentionKey = (dtype, head_size, queries, prefix * queries, direction)
                yield Case(key, partial(_make, operands, *key))


def _heads(device: str) -> tuple[int, int]:
    """Query and key/value heads: on a CPU as few as keep all threads busy, for they take long."""
    threads = max(2, torch.get_num_threads())
    return _CUDA_HEADS if device == "cuda" else (threads, threads)


@torch.no_grad()
def _make(
    operands: Operands,
    dtype: str,
    head_size: int,
    queries: int,
    keys: int,
    direction: Direction,
) -> Call:
    operands.begin()
    heads, kv_heads = _heads(operands.device)
    of = DTYPES[dtype]
    q, do = (operands.take(queries, heads, head_size, dtype=of) for _ in range(2))
    k, v = (operands.take(keys, kv_heads, head_size, dtype=of) for _ in range(2))
    if direction == "forward":
        return lambda: attention_forward(q, k, v)
    o, lse = attention_forward(q, k, v)
    dk, dv = (operands.zeros(keys, kv_heads, head_size, dtype=torch.float32) for _ in range(2))
    return lambda: attention_backward(do, q, k, v, o, lse, dk_TKD=dk, dv_TKD=dv)
