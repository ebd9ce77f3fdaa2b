"""Grid of attention shapes to time: spans of queries at the end of their keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch

from sppo.bench.operands import DTYPES
from sppo.config.model import ModelConfig
from sppo.cost.flops import causal_pairs
from sppo.kernels.attention.choice import AttentionCase
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
        heads: Numbers of heads.
        head_sizes: Sizes of the heads of queries, keys and values.
        prefixes: Ratios of keys to queries.
    """

    queries: tuple[int, ...]
    heads: Heads
    head_sizes: tuple[int, ...]
    prefixes: tuple[int, ...] = _PREFIXES

    def problems(self, dtypes: Sequence[str]) -> Iterator[list[AttentionShape]]:
        """Yield the shapes of each dtype and head size, which differ in length only."""
        for dtype, size in product(dtypes, self.head_sizes):
            yield [
                AttentionShape(dtype, queries, prefix * queries, self.heads, size)
                for queries in self.queries
                for prefix in self.prefixes
            ]


def attention_grid(device: str, *, quick: bool, model: ModelConfig | None = None) -> AttentionGrid:
    """Return the grid of a device, with the heads of a model, or else with common ones.

    A CPU is slow, so its common number of heads is the smallest that keeps all threads busy, at
    least two.
    """
    threads = max(2, torch.get_num_threads())
    heads = Heads(32, 8) if device == "cuda" else Heads(threads, threads)
    sizes = _QUICK_HEAD_SIZES if quick else _HEAD_SIZES
    if model is not None:
        heads, sizes = Heads(model.num_heads, model.kv_heads), (model.head_dim,)
    return AttentionGrid(
        queries=(_QUICK_QUERIES if quick else _QUERIES)[device],
        heads=heads,
        head_sizes=sizes,
        prefixes=_QUICK_PREFIXES if quick else _PREFIXES,
    )
