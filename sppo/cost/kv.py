"""Bytes and seconds of offloading or recomputing a stage's K and V between forward and backward.

In the looped order only one stage of a rank reads its K and V at a time, so the other stages may
offload or recompute theirs. The last stage of each rank retains its K and V, since its backward
follows its forward.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from sppo.activations.activation_layout import (
    BLOCK_ALIGNMENT_BYTES,
    TENSOR_ALIGNMENT_BYTES,
    aligned_bytes,
)
from sppo.activations.placement import Counts
from sppo.config.model import LayerType
from sppo.cost.candidate import Candidate
from sppo.cost.layer import ACCUMULATION_BYTES, Workload, kv_seconds
from sppo.cost.layer_kinds import LayerKind, Shapes
from sppo.cost.sharding.collectives import layer_gather_seconds
from sppo.schedule.costs import Table
from sppo.schedule.transfers.copies import KVPlacement


def kv_bytes_per_token(workload: Workload) -> tuple[float, float]:
    """Return the bytes per token and layer of K and V, and of their fp32 gradients, on one device.

    A sequence-parallel group with more devices than K/V heads holds each head several times.
    """
    model = workload.model
    degree = min(workload.sequence_parallel_degree, model.kv_heads)
    elements = 2 * model.kv_heads * model.head_dim / degree
    return elements * workload.element_bytes, elements * ACCUMULATION_BYTES


def kv_tokens(candidate: Candidate) -> tuple[Table, Table, Table]:
    """Return the bytes of K and V of a token on each stage, [stages] each.

    Returns:
        K and V of layers with a backward, their gradients, and K and V of layers without one.
    """
    kv_bytes, gradient_bytes = kv_bytes_per_token(candidate.workload)
    layers, every = candidate.backward_layers, candidate.layer_counts
    return layers * kv_bytes, layers * gradient_bytes, (every - layers) * kv_bytes


def kv_offload_bytes(candidate: Candidate) -> Table:
    """Return the bytes of K and V that each stage offloads of each subsequence, [stages, N]."""
    row_bytes, _ = kv_bytes_per_token(candidate.workload)
    result: Table = _layers(candidate, "offloaded")[:, None] * np.array(candidate.lengths)
    return result * row_bytes


def kv_recompute_seconds(candidate: Candidate) -> Table:
    """Return the seconds in which each stage recomputes K and V of a subsequence, [stages, N].

    With sharded weights (ZeRO-3), whole layers are gathered, one layer ahead of the compute; the
    longer of gather and compute counts.
    """
    gather_s = layer_gather_seconds(candidate) * (_layers(candidate, "recomputed") > 0)
    seconds: Table = np.maximum(kv_compute_seconds(candidate), gather_s[:, None])
    return seconds


def kv_compute_seconds(candidate: Candidate) -> Table:
    """Return the seconds of recomputing K and V, without gathers of weights, [stages, N]."""
    tokens = np.array(candidate.lengths, dtype=np.float64)
    recomputes = np.array([kv == "recomputed" for kv in candidate.kv_of_stages])
    seconds: Table = np.zeros((len(recomputes), len(tokens)))
    if not recomputes.any():
        return seconds
    layers = [_kv_projections(kinds) for kinds in candidate.kinds_of_layers]
    for own in set().union(*layers):
        counts = np.array([of_stage[own] for of_stage in layers]) * recomputes
        layer_type, matrices = own
        seconds += counts[:, None] * kv_seconds(
            candidate.workload, layer_type, tokens=tokens, matrices=matrices
        )
    return seconds


def kv_blocks(candidate: Candidate) -> Counts:
    """Return the bytes of the packed block of K and V of one layer of each subsequence, [N]."""
    row_bytes, _ = kv_bytes_per_token(candidate.workload)
    parts = np.array(candidate.lengths) * int(row_bytes) // 2
    both = 2 * aligned_bytes(parts, TENSOR_ALIGNMENT_BYTES)
    return aligned_bytes(both, BLOCK_ALIGNMENT_BYTES)


def largest_kv_block(candidate: Candidate) -> int:
    """Return the bytes of the largest offloaded block of K and V; 0 if none is offloaded."""
    leaves = _layers(candidate, "offloaded").any()
    return int(kv_blocks(candidate).max()) if leaves else 0


def kv_tier_bytes(candidate: Candidate) -> Counts:
    """Return the bytes of K and V that a stage offloads of its largest sequence, [stages]."""
    blocks = kv_blocks(candidate)
    largest = max(int(blocks[own].sum()) for own in candidate.distinct_sequences)
    whole: Counts = _layers(candidate, "offloaded") * largest
    return whole


def _kv_projections(kinds: Counter[LayerKind]) -> Counter[tuple[LayerType, Shapes]]:
    """Return the number of layers with a backward by type, and projections to K and V."""
    found: Counter[tuple[LayerType, Shapes]] = Counter()
    for kind, count in kinds.items():
        found[kind.type, kind.projections("k", "v")] += count * kind.has_backward
    return found


def _layers(candidate: Candidate, placement: KVPlacement) -> Counts:
    """Return the layers of each stage whose K and V have `placement`, 0 for others, [stages].

    A layer without backward needs its K and V no longer.
    """
    is_placed = [kv == placement for kv in candidate.kv_of_stages]
    return candidate.backward_layers.astype(np.int64) * is_placed
