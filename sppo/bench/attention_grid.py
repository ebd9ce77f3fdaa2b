"""Shapes at which attention is timed: spans of queries at the end of their keys, on a grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch

from sppo.bench.operands import DTYPES
from sppo.cost.flops import causal_pairs
from sppo.kernels.attention.choice import AttentionCase, BackendName
from sppo.units import format_tokens

_QUERIES = {"cpu": (256, 1024), "cuda": (1024, 4096, 16384)}
_PREFIXES = (1, 2, 4, 8)
_HEAD_SIZES = (64, 128)
_QUICK_QUERIES = {"cpu": (256, 512), "cuda": (2048, 8192)}
_QUICK_PREFIXES = (1, 4)
_QUICK_HEAD_SIZES = (64,)


class Heads(NamedTuple):
    """Numbers of query heads and of key/value heads of one attention."""

    queries: int
    kv: int
    """Heads of keys and values; divides those of queries."""

    def __str__(self) -> str:
        return str(self.queries) if self.queries == self.kv else f"{self.queries}/{self.kv}"


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One attention: ``queries`` rows, the last of ``keys`` positions."""

    dtype: str
    queries: int
    keys: int
    heads: Heads
    head_size: int

    @property
    def forward_flops(self) -> int:
        """FLOPs of the forward, over visible pairs only."""
        pairs = causal_pairs(self.keys - self.queries, self.keys)
        return 4 * self.heads.queries * self.head_size * pairs

    def case(self, device: str) -> AttentionCase:
        """Return what a back end has to be able to do for it."""
        group = self.heads.queries // self.heads.kv
        where = torch.device(device)
        return AttentionCase(where, DTYPES[self.dtype], self.head_size, group, window=False)

    def __str__(self) -> str:
        return (
            f"{self.dtype}, {format_tokens(self.queries)} queries at the end of "
            f"{format_tokens(self.keys)} keys, {self.heads} heads of {self.head_size}"
        )


@dataclass(frozen=True, slots=True)
class AttentionGrid:
    """Axes of the shapes to time.

    Attributes:
        queries: Of the spans, shortest first.
        heads: The first are those that points for plans are measured with.
        head_sizes: Of a query, a key and a value.
        prefixes: Keys relative to the queries, where ``keys`` is None.
        keys: The same for all queries, none below the most of them.
        backends: Only these; None for all that can run.
        fixed: Somebody asked for these shapes, so a slow device does not get shorter spans, and
            slow back ends get more time.
    """

    queries: tuple[int, ...]
    heads: tuple[Heads, ...]
    head_sizes: tuple[int, ...]
    prefixes: tuple[int, ...] = _PREFIXES
    keys: tuple[int, ...] | None = None
    backends: tuple[BackendName, ...] | None = None
    fixed: bool = False

    @property
    def for_plans(self) -> bool:
        """Return whether all queries have the same numbers of keys each, as plans read them."""
        return self.keys is None or len(self.queries) == 1

    def problems(self, dtypes: Sequence[str]) -> Iterator[list[AttentionShape]]:
        """The spans of every dtype, heads and head size: what differs is their length."""
        for dtype, heads, size in product(dtypes, self.heads, self.head_sizes):
            yield [
                AttentionShape(dtype, queries, keys, heads, size)
                for queries in self.queries
                for keys in self.keys or [prefix * queries for prefix in self.prefixes]
            ]


def attention_grid(device: str, *, quick: bool) -> AttentionGrid:
    """Return the shapes that are timed where nobody asks for any.

    On a CPU there are as few heads as keep all threads busy, for they take long.
    """
    threads = max(2, torch.get_num_threads())
    return AttentionGrid(
        queries=(_QUICK_QUERIES if quick else _QUERIES)[device],
        heads=(Heads(32, 8) if device == "cuda" else Heads(threads, threads),),
        head_sizes=_QUICK_HEAD_SIZES if quick else _HEAD_SIZES,
        prefixes=_QUICK_PREFIXES if quick else _PREFIXES,
    )
