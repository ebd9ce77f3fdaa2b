"""Memory of saved activations on the device and in the tier: held units, slots, ring and file.

The figures equal those that a run allocates. A packed block holds one layer. H2D copies fill a ring
of slots on the device that is allocated once. On a CPU, blocks leave for the disk through slots
that are allocated once, too. On a GPU the saved tensor is the source of its D2H copy, and compute
waits while `MAX_BLOCKS_IN_FLIGHT_OUT` blocks are being copied. Both take memory for a fixed number
of blocks, so the figures do not depend on time. The stages of a rank share one set of slots: as
many as the stage with most layers needs, each as large as the rank's largest block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from sppo.activations.activation_layout import MAX_BLOCKS_IN_FLIGHT_OUT
from sppo.activations.block_layout import BlockLayout
from sppo.activations.placement import ActivationPlacement, Counts
from sppo.activations.tensor_classes import (
    ATTENTION,
    CLASSES,
    LINEAR,
    X_IN,
    class_bytes_per_token,
)
from sppo.config.model import LayerType
from sppo.cost.candidate import Candidate, of_ranks
from sppo.cost.kv import kv_layers, kv_tier_bytes, largest_kv_block
from sppo.cost.memory.messages import sent_bytes
from sppo.cost.memory.stage_memory import StageMemory
from sppo.cost.memory.state_memory import collective_bytes, of_each_rank
from sppo.cost.memory.unit_working_sets import (
    block_layout,
    computing_bytes,
    joined_bytes,
    queries_bytes,
)
from sppo.cost.memory.walk import bytes_at_peak, walk_of
from sppo.cost.stages.saved_bytes import placed_bytes
from sppo.cost.stages.seconds import weight_operand_bytes
from sppo.cost.stages.stage_cost import kinds_of_stages
from sppo.schedule.costs import Table


def stage_blocks(placement: ActivationPlacement, shape: BlockLayout, *, stage: int) -> Counts:
    """Return the bytes of the block of each layer of each subsequence, [subsequences, layers]."""
    saved = placement.recomputed[stage, :, ATTENTION] == 0
    return shape.blocks(placement.offloaded[stage], attention_saved=saved)


def block_slots(candidate: Candidate, layout: BlockLayout) -> tuple[int, int, int]:
    """Return how many blocks have memory at once, beside that of the running layer.

    On a CPU, copies to a disk pass through slots on the device. A GPU copies from where tensors
    are, and to a disk through slots in host memory.

    Returns:
        Blocks for which device memory is allocated all the time: that leave, come back or are in
        use; blocks that leave from their own memory while another layer runs; slots of host memory.
    """
    if candidate.workload.hardware.device.kind == "cpu":
        return layout.staging_slots + layout.ring_slots, 0, 0
    in_host = layout.staging_slots if candidate.tier == "disk" else 0
    return layout.ring_slots, MAX_BLOCKS_IN_FLIGHT_OUT - 1, in_host


def copy_slots(candidate: Candidate) -> tuple[Callable[[ActivationPlacement], float], ...]:
    """Return a function for each rank: the most bytes that copies of its stages' tensors need."""
    ranks = candidate.pipeline_parallel_degree
    layouts = [block_layout(candidate, stage=stage) for stage in range(candidate.num_stages)]
    made: dict[object, Callable[[ActivationPlacement], float]] = {}
    slots = []
    for rank in range(ranks):
        own = layouts[rank::ranks]
        largest = max(own, key=lambda layout: len(layout.layers))
        # One type of those whose layers save equal tensors.
        types = {(one.routed, one.linear): one for layout in own for one in layout.row_bytes}
        key = len(largest.layers), frozenset(types)
        if key not in made:
            made[key] = _copy_slots(candidate, largest, types.values())
        slots.append(made[key])
    return tuple(slots)


def _copy_slots(
    candidate: Candidate, shape: BlockLayout, types: Collection[LayerType]
) -> Callable[[ActivationPlacement], float]:
    """Return the function of a rank whose stage of most layers has the given layout.

    There are slots for blocks of the subsequence that offloads most, whatever is copied when. A
    class that is cut is joined, or if its last part is recomputed, those of its tensors that the
    working set does not count already, for as many layers as backward holds at once. The type of
    layer whose tensors are largest counts, of the `types` of the rank's layers.
    """
    workload, longest = candidate.workload, max(candidate.lengths)
    reserved, leaving, _ = block_slots(candidate, shape)
    count, at_once = reserved + leaving, shape.taken_at_once
    classes = [
        class_bytes_per_token(workload.model, own, element_bytes=workload.element_bytes)
        for own in types
    ]
    row_bytes = np.array(classes).reshape(-1, len(CLASSES)) / workload.sequence_parallel_degree
    padding_bytes = shape.most_padding_bytes
    has_kv = any(not own.linear for own in types)
    least_bytes = count * largest_kv_block(candidate) * has_kv
    joined_bytes = longest * row_bytes.max(initial=0)
    own_bytes = queries_bytes(shape, np.array(candidate.lengths)).max()

    def bytes_of(placement: ActivationPlacement) -> float:
        blocks = float((placement.offloaded @ row_bytes.T).max(initial=0))
        slots = count * (blocks + padding_bytes * (blocks > 0))
        retains, offloads, recomputes = (table > 0 for table in placement)
        joined = joined_bytes * _any_class(retains & offloads & ~recomputes)
        joined = joined + own_bytes * _any_class((retains | offloads) & recomputes)
        layers = np.where(recomputes[:, :, ATTENTION], 1, at_once)
        return max(slots, least_bytes) + float((joined * layers).max())

    return bytes_of


def _any_class(holds: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return whether any class is True, [stages, subsequences]; many times faster than np.any."""
    return holds[:, :, X_IN] | holds[:, :, ATTENTION] | holds[:, :, LINEAR]


def tier_padding_bytes(candidate: Candidate) -> Table:
    """Return the upper bound of bytes that alignment adds to offloaded tensors, [stages]."""
    each = max(
        block_layout(candidate, stage=stage).most_padding_bytes
        for stage in range(candidate.num_stages)
    )
    blocks = candidate.backward_layers * each
    most = max(own.stop - own.start for own in candidate.distinct_sequences)
    padding: Table = (blocks * walk_of(candidate).sequences_held * most).astype(np.float64)
    return padding


def with_placement(
    states: tuple[StageMemory, ...], *, candidate: Candidate, placement: ActivationPlacement
) -> tuple[StageMemory, ...]:
    """Return the memory of each rank with the saved activations of `placement`.

    Args:
        states: Memory of each rank without saved activations.
        candidate: Candidate to price.
        placement: Placement by the activation policy.
    """
    walk = walk_of(candidate)
    activations = walk.held(
        placed_bytes(placement, "retained", candidate=candidate),
        deferred=weight_operand_bytes(candidate),
    )
    if candidate.keeps_a_stack:
        activations[:] = activations.max(axis=1, keepdims=True)
    firsts, kinds = kinds_of_stages(candidate, placement)
    rooms = [_stage_room(candidate, placement, stage=stage) for stage in firsts]
    *of_slots, tier = np.array(rooms, dtype=np.int64)[kinds].T
    slots, waiting, staging, joined, blocks, last_blocks = (
        candidate.by_rank(table).max(axis=0) for table in of_slots
    )
    kv_block = largest_kv_block(candidate) * (of_ranks(candidate, kv_layers(candidate)) > 0)
    blocks, last_blocks = np.maximum(blocks, kv_block), np.maximum(last_blocks, kv_block)
    leaving = waiting * (blocks + kv_block)
    computing = computing_bytes(candidate, placement)
    # Beside a backward, a block of the last layers that ran forward leaves.
    candidate.by_rank(computing[1])[...] -= (waiting * (blocks - last_blocks))[:, None]
    at_peak = bytes_at_peak(
        candidate,
        walk,
        activations=activations,
        computing=walk.running(computing),
        sent=walk.running(sent_bytes(candidate)),
    )
    buckets = {
        **at_peak,
        "communication_bytes": at_peak["communication_bytes"] + collective_bytes(candidate),
        "copies_bytes": slots * blocks,
        "working_bytes": at_peak["working_bytes"] + leaving + joined,
    }
    behind = {
        # Extents in the tier are assigned to whole sequences, stage after stage.
        "tier_activations_bytes": of_ranks(
            candidate, (tier + kv_tier_bytes(candidate)) * walk.sequences_held
        ),
        "staging_bytes": staging * blocks,
    }
    found = zip(states, of_each_rank(buckets), of_each_rank(behind), strict=True)
    return tuple(
        replace(state, device=replace(state.device, **on_device), **in_tiers)
        for state, on_device, in_tiers in found
    )


def _stage_room(
    candidate: Candidate, placement: ActivationPlacement, *, stage: int
) -> tuple[int, ...]:
    """Return the slots and bytes that offloading takes for one stage.

    Returns:
        Numbers of blocks (:func:`block_slots`); bytes of tensors that backward joins from parts (0
        on a GPU, whose working sets include them), of the largest block, of the largest block of
        the last layers that share an input, and of the largest sequence in the tier.
    """
    layout = block_layout(candidate, stage=stage)
    blocks = stage_blocks(placement, layout, stage=stage)
    on_gpu = candidate.workload.hardware.device.kind == "cuda"
    return (
        *block_slots(candidate, layout),
        0 if on_gpu else int(joined_bytes(placement, layout, stage=stage).max()),
        int(blocks.max(initial=0)),
        int(blocks[:, -candidate.input_every :].max(initial=0)),
        max(int(blocks[own].sum()) for own in candidate.distinct_sequences),
    )
