"""Memory of saved tensors that a placement divides by rows and backward joins."""

from __future__ import annotations

import numpy as np

from sppo.activations.activation_layout import BlockLayout
from sppo.activations.placement import ActivationPlacement, Counts
from sppo.activations.tensor_classes import ATTENTION, LINEAR, tensor_bytes_per_token
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
    keys, which are joined earlier and count here.

    Args:
        placement: Placement by the activation policy.
        shape: Layout of the blocks of the stage.
        stage: Index of the stage.
    """
    tables = (placement.retained, placement.offloaded, placement.recomputed)
    retains, offloads, recomputes = (table[stage] > 0 for table in tables)
    is_cut = (retains & offloads) | ((retains | offloads) & recomputes)
    tokens = placement.tokens
    other, first = shape.layer_bytes(tokens[:, None] * (is_cut & ~recomputes))
    shared = shape.taken_at_once(attention_saved=True)
    layers = np.where(recomputes[:, ATTENTION], 1, shared)
    sooner = (is_cut & recomputes)[:, LINEAR] * queries_bytes(shape, tokens)
    found: Counts = first + (layers - 1) * other + layers * sooner
    return found


def queries_bytes(shape: BlockLayout, tokens: Counts) -> Counts:
    """Return the bytes of saved queries, and of saved keys if any, of one layer, [N]."""
    names = [name for name in ("q", "k") if name in shape.row_bytes]
    return sum((shape.sharded_bytes(name, tokens) for name in names), start=np.zeros_like(tokens))
