"""Memory of saved tensors that a placement divides by rows and backward joins."""

from __future__ import annotations

import numpy as np

from sppo.activations.activation_layout import BlockLayout
from sppo.activations.placement import ActivationPlacement, Counts
from sppo.activations.tensor_classes import (
    ATTENTION,
    CLASSES,
    LINEAR,
    tensor_bytes_per_token,
)
from sppo.cost.candidate import Candidate


def block_layout(candidate: Candidate, *, stage: int) -> BlockLayout:
    """Return the layout of the packed blocks of one stage."""
    workload = candidate.workload
    return BlockLayout(
        tensor_bytes_per_token(workload.model, element_bytes=workload.element_bytes),
        layers=candidate.stages[stage],
        input_every=candidate.input_every,
        shard_count=workload.sequence_parallel_degree,
    )


def joined_bytes(placement: ActivationPlacement, shape: BlockLayout, *, stage: int) -> Counts:
    """Return the bytes of tensors of each subsequence that backward joins from parts, [N].

    All layers that share a saved input count together: backward takes them at once, and the joined
    tensors of a layer stay until its own backward ends. The input itself counts once. A partly
    recomputed tensor counts in the working set as if it were recomputed whole, except queries and
    keys, which are joined earlier and count here. A subsequence counts as long as the longest one
    whose classes are divided alike.

    Args:
        placement: Placement by the activation policy.
        shape: Layout of the blocks of the stage.
        stage: Index of the stage.
    """
    tables = (placement.retained, placement.offloaded, placement.recomputed)
    retains, offloads, recomputes = (table[stage] > 0 for table in tables)
    is_cut = (retains & offloads) | ((retains | offloads) & recomputes)
    kinds = np.hstack([is_cut, recomputes]) @ (1 << np.arange(2 * len(CLASSES)))
    lengths = placement.tokens
    found = np.zeros(len(lengths), dtype=np.int64)
    for kind in sorted(set(kinds[is_cut.any(axis=1)].tolist())):
        index = int(np.argmax(np.where(kinds == kind, lengths, 0)))
        tokens = int(lengths[index])
        joined, completed = is_cut[index] & ~recomputes[index], is_cut[index] & recomputes[index]
        x_in, attention, linear = (tokens if joins else 0 for joins in joined.tolist())
        rows = (x_in, attention, linear)
        first, other = (
            sum(shape.tensor_bytes(rows, own_input=own).values()) for own in (True, False)
        )
        layers = shape.taken_at_once(attention_saved=not recomputes[index, ATTENTION])
        sooner = queries_bytes(shape, tokens) if completed[LINEAR] else 0
        found[kinds == kind] = first + (layers - 1) * other + layers * sooner
    return found


def queries_bytes(shape: BlockLayout, tokens: int) -> int:
    """Return the bytes of saved queries, and of saved keys if any, of one layer."""
    sizes = shape.tensor_bytes((0, 0, tokens), own_input=False)
    return sum(size for name, size in sizes.items() if name in ("q", "k"))
