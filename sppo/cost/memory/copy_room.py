"""Memory and room that offloading takes, exactly as a run sets it aside: slots, ring, and file.

Blocks of one layer each come back into a ring of slots on the device, reserved once. On a machine
whose device memory is RAM and whose next tier is a disk, they leave through slots that are reserved
too. On an accelerator a tensor on its way out is its own source: compute waits as soon as two
blocks are still on their way. Either way there is room for a number of blocks, whatever is copied
when, so nothing here depends on time. The stages of a rank take turns with one set of slots: as
many as the longest of them needs, each as large as the largest block of all.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from sppo.activations.activation_layout import SOURCES_HELD, BlockLayout
from sppo.activations.placement import ActivationPlacement, CopySlots, Counts
from sppo.activations.tensor_classes import ATTENTION, class_bytes_per_token
from sppo.cost.candidate import Candidate
from sppo.cost.kv import kv_tier_bytes, largest_kv_block
from sppo.cost.memory.joined_tensors import block_layout, joined_bytes, queries_bytes
from sppo.cost.memory.stage_memory import StageMemory, with_activations
from sppo.cost.memory.units_in_flight import UnitsInFlight
from sppo.schedule.costs import Table


def _layouts(candidate: Candidate) -> list[BlockLayout]:
    """The blocks of every stage."""
    return [block_layout(candidate, stage=stage) for stage in range(len(candidate.stages))]


def passes_through_slots(candidate: Candidate) -> bool:
    """Return whether copies go through memory of the device that is reserved once."""
    return candidate.workload.hardware.device.kind == "cpu"


def stage_blocks(placement: ActivationPlacement, shape: BlockLayout, *, stage: int) -> Counts:
    """Bytes of the block of every layer of every subsequence, [subsequences, layers]."""
    sizes = shape.block_sizes(placement.offloaded[stage])
    saved = placement.recomputed[stage, :, ATTENTION] == 0
    own_input = np.array(
        [
            [shape.has_own_input(layer, attention_saved=attention) for layer in shape.layers]
            for attention in (False, True)
        ]
    )
    without, with_input = sizes[:, :, None]
    blocks: Counts = np.where(own_input[saved.astype(np.int64)], with_input, without)
    return blocks


def slots_on_device(candidate: Candidate, layout: BlockLayout) -> int:
    """Blocks that are on the device at once, on their way out, back, or in use.

    Of the sources on their way out one is the running layer's, which its working set counts.
    """
    return reserved_slots(candidate, layout) + _sources_waiting(candidate)


def reserved_slots(candidate: Candidate, layout: BlockLayout) -> int:
    """Blocks that there is memory for all the time."""
    leaving = layout.staging_slots if passes_through_slots(candidate) else 0
    return leaving + layout.ring_slots


def staging_slots(candidate: Candidate, layout: BlockLayout) -> int:
    """Blocks that there is host memory for in front of a disk; on a CPU they are on the device."""
    return layout.staging_slots if candidate.tier == "disk" else 0


def _sources_waiting(candidate: Candidate) -> int:
    """Blocks in memory of their own that leave while another layer runs."""
    return 0 if passes_through_slots(candidate) else SOURCES_HELD - 1


def copy_slots(candidate: Candidate, *, shares: Table) -> CopySlots:
    """Return the bytes of slots, as a function of the rows that are offloaded.

    Args:
        candidate: whose.
        shares: of each stage in the one set of slots of its rank, [stages].
    """
    workload = candidate.workload
    # Nothing here depends on which layers a stage has, only on how many.
    by_layers = {len(shape.layers): shape for shape in _layouts(candidate)}
    longest_of_ranks = [
        by_layers[len(candidate.stages[_longest_stage(candidate, rank=rank)])]
        for rank in range(candidate.pipeline_parallel_degree)
    ]
    shapes = longest_of_ranks * candidate.virtual_stages
    counts = shares * [slots_on_device(candidate, shape) for shape in shapes]
    classes = class_bytes_per_token(workload.model, element_bytes=workload.element_bytes)
    classes = classes / workload.sequence_parallel_degree
    longest = max(candidate.lengths)
    queries = {layers: queries_bytes(shape, longest) for layers, shape in by_layers.items()}
    return CopySlots(
        row_bytes=counts[:, None] * classes,
        padding_bytes=counts * np.array([shape.most_padding_bytes for shape in shapes]),
        joined_bytes=shares * longest * float(classes.max()),
        queries_bytes=shares * [queries[len(shape.layers)] for shape in shapes],
        taken_at_once=np.array(
            [shape.taken_at_once(attention_saved=True) for shape in shapes], dtype=float
        ),
    )


def _longest_stage(candidate: Candidate, *, rank: int) -> int:
    """Return the stage of a rank that has most layers."""
    return max(candidate.stages_of_rank(rank), key=lambda stage: len(candidate.stages[stage]))


def tier_padding_bytes(candidate: Candidate, *, units: UnitsInFlight) -> Table:
    """Return the most bytes that alignment adds to offloaded tensors in the tier, [stages]."""
    shapes = _layouts(candidate)
    blocks = np.array([len(shape.layers) * shape.most_padding_bytes for shape in shapes])
    most = max(own.stop - own.start for own in candidate.distinct_sequences)
    padding: Table = (blocks * units.sequences * most).astype(np.float64)
    return padding


def with_placement(
    states: tuple[StageMemory, ...],
    *,
    candidate: Candidate,
    placement: ActivationPlacement,
    units: UnitsInFlight,
) -> tuple[StageMemory, ...]:
    """Memory of each rank with what a placement retains, offloads and recomputes.

    Args:
        states: without any saved activation.
        candidate: whose.
        placement: of its activation policy.
        units: in flight.
    """
    held = with_activations(states, candidate=candidate, placement=placement, units=units)
    by_kind: dict[Hashable, _StageRoom] = {}
    rooms: list[_StageRoom] = []
    for stage, layers in enumerate(candidate.stages):
        kind = len(layers), placement.alike[stage]
        if kind not in by_kind:
            by_kind[kind] = _stage_room(candidate, placement, stage=stage)
        rooms.append(by_kind[kind])
    found = []
    kv_block_bytes, kv_bytes = largest_kv_block(candidate), kv_tier_bytes(candidate)
    for rank, memory in enumerate(held):
        own, device = candidate.stages_of_rank(rank), memory.device
        layout = block_layout(candidate, stage=_longest_stage(candidate, rank=rank))
        block_bytes = max(kv_block_bytes, *(rooms[stage].block_bytes for stage in own))
        leaving_bytes = _sources_waiting(candidate) * (block_bytes + kv_block_bytes)
        joined_bytes = max(rooms[stage].joined_bytes for stage in own)
        device = replace(
            device,
            copies_bytes=reserved_slots(candidate, layout) * block_bytes,
            working_bytes=device.working_bytes + leaving_bytes + joined_bytes,
        )
        # Extents in the tier are assigned to whole sequences, stage after stage.
        tier = sum(
            (rooms[stage].tier_bytes + int(kv_bytes[stage])) * int(units.sequences[stage])
            for stage in own
        )
        staging_bytes = staging_slots(candidate, layout) * block_bytes
        found.append(
            replace(
                memory,
                device=device,
                tier_activations_bytes=tier,
                staging_bytes=staging_bytes,
            )
        )
    return tuple(found)


class _StageRoom(NamedTuple):
    """Bytes of what one stage offloads."""

    block_bytes: int
    """Bytes of the largest block."""
    joined_bytes: int
    """Bytes of tensors that are joined from parts."""
    tier_bytes: int
    """Bytes of one sequence in the tier."""


def _stage_room(candidate: Candidate, placement: ActivationPlacement, *, stage: int) -> _StageRoom:
    layout = block_layout(candidate, stage=stage)
    blocks = stage_blocks(placement, layout, stage=stage)
    on_gpu = candidate.workload.hardware.device.kind == "cuda"
    return _StageRoom(
        int(blocks.max()),
        0 if on_gpu else int(joined_bytes(placement, layout, stage=stage).max()),
        max(int(blocks[own].sum()) for own in candidate.distinct_sequences),
    )
