"""First visible key of each query of a span, as read by the Triton attention kernels.

A query sees the keys from its *first* key to its own position. Windows and documents only change
the first key, which never decreases from one query to the next. So a block of queries sees keys in
three runs: keys that only earlier queries of the block see, keys that all see, and the diagonal.

Legend: C queries, T keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sppo.kernels.host_tables import on_device, stream_number


@dataclass(frozen=True, slots=True)
class VisibleKeys:
    """First visible keys of a span's queries, relative to the earliest of them."""

    earliest: int
    """Position in the sequence of the earliest key that any query of the span sees."""
    first_C: Tensor | None
    """First key of each query, int32, relative to ``earliest``; None if all are ``earliest``."""


def visible_keys(
    num_queries: int,
    num_keys: int,
    *,
    window: int | None,
    document_starts: tuple[int, ...],
    device: torch.device,
) -> VisibleKeys:
    """Return the :class:`VisibleKeys` of a span; the tensor is cached for the next layer's call."""
    start = num_keys - num_queries
    begin = max((s for s in document_starts if s <= start), default=0)
    inside = tuple(s for s in sorted(document_starts) if start < s < num_keys)
    if not inside and (window is None or num_keys - begin <= window):
        return VisibleKeys(begin, None)
    stream = stream_number(device)
    return _bounded(num_queries, num_keys, window, (begin, *inside), device, stream)


@lru_cache(maxsize=8)
def _bounded(
    num_queries: int,
    num_keys: int,
    window: int | None,
    edges: tuple[int, ...],
    device: torch.device,
    stream: int,
) -> VisibleKeys:
    """Return visible keys for calls on ``stream``: the tensor is written on it and read there."""
    del stream
    position = torch.arange(num_keys - num_queries, num_keys)
    starts = torch.tensor(edges)
    first = starts[torch.searchsorted(starts, position, right=True) - 1]
    if window is not None:
        first = torch.maximum(first, position - window + 1)
    earliest = int(first[0])
    return VisibleKeys(earliest, on_device((first - earliest).to(torch.int32), device))


@triton.jit
def key_runs(
    first_ptr,
    query,
    num_queries,
    start,
    HAS_FIRST: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Return the bounds ``(a, b, c, d)`` of the three runs of keys of a block of queries.

    All queries of the block see keys ``[b, c)``; only some see keys ``[a, b)`` and ``[c, d)``. All
    bounds except ``d`` are multiples of ``KEYS``.
    """
    last = tl.minimum(query + QUERIES, num_queries) - 1
    begin = 0
    full_begin = 0
    if HAS_FIRST:
        begin = tl.load(first_ptr + query) // KEYS * KEYS
        full_begin = (tl.load(first_ptr + last) + KEYS - 1) // KEYS * KEYS
    full_end = tl.maximum((start + query + 1) // KEYS * KEYS, begin)
    full_begin = tl.minimum(full_begin, full_end)
    return begin, full_begin, full_end, start + last + 1


@triton.jit
def query_run(
    first_ptr,
    key,
    num_queries,
    num_keys,
    HAS_FIRST: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Return ``(a, b)``: only queries ``[a, b)`` see keys of a block; ``QUERIES`` divides ``a``."""
    begin = tl.maximum(key - (num_keys - num_queries), 0) // QUERIES * QUERIES
    end = num_queries
    if HAS_FIRST:
        last = tl.minimum(key + KEYS, num_keys) - 1
        end = queries_from(first_ptr, last, num_queries)
    return begin, end


@triton.jit
def queries_from(first_ptr, key, num_queries):
    """Return the number of queries whose first key is at most ``key``, by binary search."""
    low = 0
    high = num_queries
    while low < high:
        middle = (low + high) // 2
        if tl.load(first_ptr + middle) <= key:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def is_visible(first_m, position_m, key_t, HAS_FIRST: tl.constexpr):
    """Return ``[m, t]``: whether each key lies between the query's first key and its position."""
    visible_mt = key_t[None, :] <= position_m[:, None]
    if HAS_FIRST:
        visible_mt = visible_mt & (key_t[None, :] >= first_m[:, None])
    return visible_mt
