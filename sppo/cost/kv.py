"""Bytes of K and V, and seconds of offloading or recomputing them between forward and backward.

Layers with a sliding window may recompute K and V in the backward of each unit, in every order.
In the looped order only one stage of a rank reads its K and V at a time, so the other stages may
offload or recompute theirs. The last stage of each rank retains its K and V, since its backward
follows its forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sppo.activations.block_layout import (
    BLOCK_ALIGNMENT_BYTES,
    TENSOR_ALIGNMENT_BYTES,
    aligned_bytes,
)
from sppo.activations.placement import Counts
from sppo.config.model import LayerType
from sppo.cost.candidate import Candidate
from sppo.cost.layer import kv_seconds
from sppo.cost.layer_kinds import LayerKind, Shapes
from sppo.cost.linear_attention.states import passing_states_of_units
from sppo.cost.sharding.collectives import layer_gather_seconds
from sppo.cost.workload import ACCUMULATION_BYTES, Workload
from sppo.schedule.costs import SeenKV, Table
from sppo.schedule.transfers.copies import KVPlacement


def kv_bytes_per_token(workload: Workload) -> tuple[float, float]:
    """Return the bytes per token and layer of K and V, and of their fp32 gradients, on one device.

    A sequence-parallel group with more devices than K/V heads holds each head several times.
    """
    model = workload.model
    degree = min(workload.sequence_parallel_degree, model.kv_heads)
    elements = 2 * model.kv_heads * model.head_dim / degree
    return elements * workload.element_bytes, elements * ACCUMULATION_BYTES


def kv_of_units(candidate: Candidate) -> tuple[Table, Table, Table]:
    """Return the bytes of K and V that each stage holds of each subsequence, [stages, N] each.

    Returns:
        K and V of layers with a backward, their gradients, and K and V of layers without one,
        with the newest states of linear attention in such layers.
    """
    kv_bytes, gradient_bytes = kv_bytes_per_token(candidate.workload)
    rows, gradient_rows, passing_rows = _held_rows(candidate)
    passing = passing_rows * kv_bytes + passing_states_of_units(candidate)
    return rows * kv_bytes, gradient_rows * gradient_bytes, passing


def seen_kv_of_units(candidate: Candidate) -> SeenKV:
    """Return the bytes of K and V that the queries of each subsequence see, [stages, N] each."""
    kv_bytes, gradient_bytes = kv_bytes_per_token(candidate.workload)
    lengths, prefixes = np.array(candidate.lengths), np.array(candidate.prefixes)
    seen, passing = np.zeros((2, candidate.num_stages, len(lengths)))
    for stage, kinds in enumerate(candidate.kinds_of_layers):
        for kind, count in _with_kv(kinds).items():
            before = prefixes if kind.window is None else np.minimum(prefixes, kind.window - 1)
            of_kind = seen if kind.has_backward else passing
            of_kind[stage] += count * (before + lengths)
    return SeenKV(seen * kv_bytes, passing * kv_bytes, seen * gradient_bytes)


def kv_of_sequences(candidate: Candidate) -> tuple[Table, Table, Table]:
    """Return the sums of :func:`kv_of_units` over the subsequences of each distinct sequence.

    Returns:
        Three tables [stages, sequences], with a single sequence if all are cut alike.
    """
    begins = [own.start for own in candidate.distinct_sequences]
    keys, gradients, passing = (
        np.add.reduceat(of_units, begins, axis=1) for of_units in kv_of_units(candidate)
    )
    return keys, gradients, passing


def _held_rows(candidate: Candidate) -> tuple[Table, Table, Table]:
    """Return the rows of K, and of V, that the layers of each stage hold: see :func:`kv_of_units`.

    A layer with a sliding window keeps gradients of the keys before the running unit that its
    queries see, and if K and V are recomputed, of each unit the keys that later units see.
    """
    shape = candidate.num_stages, len(candidate.lengths)
    rows, gradient_rows, passing_rows = np.zeros((3, *shape))
    for stage, kinds in enumerate(candidate.kinds_of_layers):
        recomputes = candidate.recomputes_windows[stage]
        for kind, count in _with_kv(kinds).items():
            own = count * _kept_rows(candidate, kind.window if recomputes else None)
            if kind.has_backward:
                rows[stage] += own
                gradient_rows[stage] += count * _gradient_rows(candidate, kind.window)
            else:
                passing_rows[stage] += own
    return rows, gradient_rows, passing_rows


def _kept_rows(candidate: Candidate, window: int | None) -> Counts:
    """Return the rows of each subsequence that a layer keeps: those that later ones see, [N]."""
    rows: Counts = np.array(candidate.lengths)
    if window is not None:
        rows = np.minimum(rows, window - 1)
        rows[_lasts(candidate)] = 0
    return rows


def _gradient_rows(candidate: Candidate, window: int | None) -> Counts:
    """Return by how many rows each subsequence adds to the kept gradients of a layer, [N].

    In sum, these are as many as the last subsequence sees keys before it: it runs backward first.
    """
    lengths = np.array(candidate.lengths)
    if window is None:
        return lengths
    prefixes = np.array(candidate.prefixes)
    rows: Counts = np.minimum(prefixes + lengths, window - 1) - np.minimum(prefixes, window - 1)
    rows[_lasts(candidate)] = 0
    return rows


def _lasts(candidate: Candidate) -> list[int]:
    """Return the last subsequence of each sequence."""
    return [own.stop - 1 for own in candidate.distinct_sequences]


def windowed_kv_seconds(candidate: Candidate) -> Table:
    """Return the seconds in which backwards recompute K and V of layers with a window.

    Returns:
        Seconds by stage and subsequence, [stages, N].
    """
    recomputes = np.array(candidate.recomputes_windows)
    layers = [
        Counter({kind: count for kind, count in kinds.items() if kind.window is not None})
        for kinds in candidate.kinds_of_layers
    ]
    return _recompute_seconds(candidate, layers, recomputes)


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
    gather_s = layer_gather_seconds(candidate) * _layers(candidate, "recomputed")
    seconds: Table = np.maximum(kv_compute_seconds(candidate), gather_s[:, None])
    return seconds


def kv_compute_seconds(candidate: Candidate) -> Table:
    """Return the seconds of recomputing K and V, without gathers of weights, [stages, N]."""
    recomputes = np.array([kv == "recomputed" for kv in candidate.kv_of_stages])
    return _recompute_seconds(candidate, candidate.kinds_of_layers, recomputes)


def _recompute_seconds(
    candidate: Candidate,
    kinds_of_layers: Sequence[Counter[LayerKind]],
    recomputes: NDArray[np.bool_],
) -> Table:
    """Return the seconds of recomputing K and V of layers of some stages, [stages, N].

    Args:
        candidate: Candidate to price.
        kinds_of_layers: Number of the layers of each kind in each stage.
        recomputes: Whether each stage recomputes K and V, [stages].
    """
    tokens = np.array(candidate.lengths, dtype=np.float64)
    seconds: Table = np.zeros((len(recomputes), len(tokens)))
    if not recomputes.any():
        return seconds
    layers = [_kv_projections(kinds) for kinds in kinds_of_layers]
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
    """Return the number of layers with K, V and a backward by type, and projections to K and V."""
    found: Counter[tuple[LayerType, Shapes]] = Counter()
    for kind, count in _with_kv(kinds).items():
        found[kind.type, kind.projections("k", "v")] += count * kind.has_backward
    return found


def _layers(candidate: Candidate, placement: KVPlacement) -> Counts:
    """Return the layers of each stage whose K and V have `placement`, 0 for others, [stages].

    A layer without backward needs its K and V no longer.
    """
    is_placed = [kv == placement for kv in candidate.kv_of_stages]
    return kv_layers(candidate) * is_placed


def kv_layers(candidate: Candidate) -> Counts:
    """Return the number of layers of each stage that have K, V and a backward, [stages]."""
    layers = [
        sum(count for kind, count in _with_kv(kinds).items() if kind.has_backward)
        for kinds in candidate.kinds_of_layers
    ]
    return np.array(layers, dtype=np.int64)


def _with_kv(kinds: Counter[LayerKind]) -> Counter[LayerKind]:
    """Return the number of layers of each kind that has K and V."""
    return Counter({kind: count for kind, count in kinds.items() if kind.linear is None})
