"""Heads of each rank of a sequence-parallel group, and checks that a degree can shard them."""

from __future__ import annotations

from typing import NamedTuple

from sppo.config.model import ModelConfig


class HeadShard(NamedTuple):
    """Heads with which each rank of a sequence-parallel group computes attention."""

    queries: int
    keys: int
    repeats: int
    """Number of ranks that use the same key/value heads."""


def head_shard(num_heads: int, kv_heads: int, *, degree: int) -> HeadShard:
    """Return the heads of one rank of a sequence-parallel group.

    Raises:
        ValueError: The heads cannot be sharded evenly.
    """
    if num_heads % degree:
        raise ValueError(
            f"parallel.sequence_parallel_degree {degree}: {num_heads} query heads cannot be "
            f"sharded evenly; use a divisor of {num_heads}"
        )
    if kv_heads % degree and degree % kv_heads:
        raise ValueError(
            f"parallel.sequence_parallel_degree {degree}: must divide the {kv_heads} key/value "
            "heads or be a multiple of them"
        )
    return HeadShard(num_heads // degree, max(1, kv_heads // degree), max(1, degree // kv_heads))


def tensor_shard(model: ModelConfig, *, degree: int) -> HeadShard:
    """Return the heads of each of ``degree`` ranks that shard the weights of every layer.

    Raises:
        ValueError: Heads or the MLP cannot be sharded evenly.
    """
    shard = head_shard(model.num_heads, model.kv_heads, degree=degree)
    if model.mlp_size % degree:
        raise ValueError(
            f"parallel.sequence_parallel_degree {degree}: with parallel.sequence_parallel=megatron "
            f"the MLP's width is sharded, and {model.mlp_size} cannot be evenly; use a divisor "
            f"of {model.mlp_size}, or parallel.sequence_parallel=ulysses"
        )
    return shard
