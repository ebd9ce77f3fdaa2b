"""Grid of attention shapes to time: spans of queries at the end of their keys."""

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

    @property
    def least_bytes(self) -> int:
        """Bytes of q, k, v, o, do, dq, and the fp32 sums of dk and dv."""
        size = DTYPES[self.dtype].itemsize
        queries = self.queries * self.heads.queries * self.head_size
        keys = self.keys * self.heads.kv * self.head_size
        return 4 * queries * size + 2 * keys * (size + torch.float32.itemsize)

    def case(self, device: str) -> AttentionCase:
        """Return the case that a back end must support to compute this shape on ``device``."""
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
        queries: Numbers of queries of the spans, in ascending order.
        heads: Numbers of heads; points for plans are measured with the first entry.
        head_sizes: Sizes of the heads of queries, keys and values.
        prefixes: Ratios of keys to queries, used if ``keys`` is None.
        keys: Numbers of keys for all ``queries``, none below the largest number of queries.
        backends: Names of the back ends to time; None for all that can run.
        fixed: Whether a user requested these shapes: a slow device does not get shorter spans, and
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
        """True if plans can read the points: all queries have equally many numbers of keys.

        True if keys are multiples of the queries, or if there is one number of queries.
        """
        return self.keys is None or len(self.queries) == 1

    def problems(self, dtypes: Sequence[str]) -> Iterator[list[AttentionShape]]:
        """Yield the shapes of each dtype, heads and head size, which differ in length only."""
        for dtype, heads, size in product(dtypes, self.heads, self.head_sizes):
            yield [
                AttentionShape(dtype, queries, keys, heads, size)
                for queries in self.queries
                for keys in self.keys or [prefix * queries for prefix in self.prefixes]
            ]


def attention_grid(device: str, *, quick: bool) -> AttentionGrid:
    """Return the default grid of a device.

    A CPU is slow, so its number of heads is the smallest that keeps all threads busy, at least two.
    """
    threads = max(2, torch.get_num_threads())
    return AttentionGrid(
        queries=(_QUICK_QUERIES if quick else _QUERIES)[device],
        heads=(Heads(32, 8) if device == "cuda" else Heads(threads, threads),),
        head_sizes=_QUICK_HEAD_SIZES if quick else _HEAD_SIZES,
        prefixes=_QUICK_PREFIXES if quick else _PREFIXES,
    )
