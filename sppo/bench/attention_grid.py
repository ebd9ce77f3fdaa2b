"""Attention shapes to time: spans of queries at the end of their keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch

from sppo.bench.operands import DTYPES
from sppo.config.model import ModelConfig
from sppo.cost.flops import causal_pairs
from sppo.kernels.attention.choice import AttentionCase

_QUERIES = {"cpu": (256, 1024), "cuda": (1024, 4096, 16384)}
_PREFIXES = (1, 2, 4, 8)
"""Ratios of keys to queries."""
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
