"""Memory and room that moving takes, exactly as the run sets it aside: slots, ring, and file.

On a machine whose device memory is RAM and whose next tier is a disk, what is on its way there or
back passes through slots that are reserved once, so they count whole, whatever moves when. On an
accelerator a tensor on its way out is its own source, and only the ring is reserved.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sppo.activations.activation_layout import BlockLayout
from sppo.activations.placement import ActivationPlacement, CopySlots, Counts, Rows
from sppo.activations.tensor_classes import ATTENTION, LINEAR, class_bytes_per_token
from sppo.cost.candidate import Candidate
from sppo.cost.memory import StageMemory
from sppo.schedule.costs import Table


def block_layout(candidate: Candidate, *, stage: int) -> BlockLayout:
    """The blocks of one stage."""
    workload = candidate.workload
    return BlockLayout(
        workload.model,
        workload.element_bytes,
        layers=candidate.stages[stage],
        input_every=candidate.input_every,
        shared_by=workload.sequence_parallel_degree,
    )


def _layouts(candidate: Candidate) -> list[BlockLayout]:
    """The blocks of every stage."""
    return [block_layout(candidate, stage=stage) for stage in range(len(candidate.stages))]


def passes_through_slots(candidate: Candidate) -> bool:
    """Whether copies go through memory of the device that is reserved once."""
    hardware = candidate.workload.hardware
    return hardware.device.kind == "cpu" and hardware.node.host_memory_bytes == 0


def stage_blocks(
    placement: ActivationPlacement, shape: BlockLayout, *, stage: int
) -> tuple[tuple[int, ...], ...]:
    """Bytes of the block of every layer of every subsequence."""
    offloaded = placement.offloaded[stage].tolist()
    recomputed = placement.recomputed[stage, :, ATTENTION].tolist()
    sizes: dict[tuple[Rows, bool], tuple[int, ...]] = {}
    blocks = []
    for (x_in, attention, linear), attention_recomputed in zip(offloaded, recomputed, strict=True):
        key = (x_in, attention, linear), attention_recomputed == 0
        if key not in sizes:
            sizes[key] = shape.blocks(key[0], attention_saved=key[1])
        blocks.append(sizes[key])
    return tuple(blocks)


def ring_share(candidate: Candidate) -> Table:
    """Of what one subsequence moves, what the ring has room for, [stages]."""
    shapes = _layouts(candidate)
    share: Table = np.array([min(1.0, shape.ring_slots / len(shape.layers)) for shape in shapes])
    return share


def copy_slots(candidate: Candidate) -> CopySlots | None:
    """What slots take, from the rows that move; None where copies pass through none."""
    if not passes_through_slots(candidate):
        return None
    workload = candidate.workload
    shapes = _layouts(candidate)
    counts = np.array([shape.staging_slots + shape.ring_slots for shape in shapes], dtype=float)
    classes = class_bytes_per_token(workload.model, element_bytes=workload.element_bytes)
    classes = classes / workload.sequence_parallel_degree
    longest = max(candidate.lengths)
    return CopySlots(
        row_bytes=counts[:, None] * classes,
        padding_bytes=counts * np.array([shape.most_padding_bytes for shape in shapes]),
        joined_bytes=np.full(len(shapes), longest * float(classes.max())),
        queries_bytes=np.array([_queries_bytes(shape, longest) for shape in shapes], dtype=float),
        taken_at_once=np.array(
            [shape.taken_at_once(attention_saved=True) for shape in shapes], dtype=float
        ),
    )


def tier_padding_bytes(candidate: Candidate, *, in_flight: Counts) -> Table:
    """What alignment adds to the offloaded tensors in the tier at most, [stages]."""
    shapes = _layouts(candidate)
    blocks = np.array([len(shape.layers) * shape.most_padding_bytes for shape in shapes])
    padding: Table = blocks * in_flight.sum(axis=1).astype(np.float64)
    return padding


def with_exact_room(
    memory: tuple[StageMemory, ...],
    *,
    candidate: Candidate,
    placement: ActivationPlacement,
    in_flight: Counts,
) -> tuple[StageMemory, ...]:
    """`memory` with what moving takes as the run will take it."""
    exact = []
    for stage, held in enumerate(memory):
        shape = block_layout(candidate, stage=stage)
        blocks = stage_blocks(placement, shape, stage=stage)
        tier = sum(
            int(times) * sum(sizes) for times, sizes in zip(in_flight[stage], blocks, strict=True)
        )
        device = held.device
        if passes_through_slots(candidate):
            largest = max(max(sizes) for sizes in blocks)
            device = replace(
                device,
                copies_bytes=(shape.staging_slots + shape.ring_slots) * largest,
                working_bytes=device.working_bytes + joined_bytes(placement, shape, stage=stage),
            )
        exact.append(replace(held, device=device, tier_activations_bytes=tier))
    return tuple(exact)


def staging_bytes(candidate: Candidate, *, placement: ActivationPlacement) -> int:
    """Host memory of the slots in front of a disk, of the stage with most."""
    most = 0
    for stage in range(candidate.pipeline_parallel_degree):
        shape = block_layout(candidate, stage=stage)
        blocks = stage_blocks(placement, shape, stage=stage)
        most = max(most, shape.staging_slots * max(max(sizes) for sizes in blocks))
    return most


def joined_bytes(placement: ActivationPlacement, shape: BlockLayout, *, stage: int) -> int:
    """Tensors that are put together again from parts, of all layers that are taken at once.

    Those that share an input are, and what is joined of each stays until its own turn is over; but
    the input itself only one of them saved. What is partly recomputed counts in the working set as
    if it were recomputed whole, but for queries and keys, which are then there sooner.
    """
    parts = np.stack(
        [placement.retained[stage], placement.offloaded[stage], placement.recomputed[stage]]
    )
    is_cut = (parts > 0).sum(axis=0) > 1
    recomputes = placement.recomputed[stage] > 0
    most = 0
    for index, tokens in enumerate(placement.tokens.tolist()):
        joined, completed = is_cut[index] & ~recomputes[index], is_cut[index] & recomputes[index]
        x_in, attention, linear = (tokens if joins else 0 for joins in joined.tolist())
        rows = (x_in, attention, linear)
        first, other = (
            sum(shape.tensor_bytes(rows, own_input=own).values()) for own in (True, False)
        )
        layers = shape.taken_at_once(attention_saved=not recomputes[index, ATTENTION])
        sooner = _queries_bytes(shape, tokens) if completed[LINEAR] else 0
        most = max(most, first + (layers - 1) * other + layers * sooner)
    return most


def _queries_bytes(shape: BlockLayout, tokens: int) -> int:
    """Saved queries, and keys, of one layer."""
    sizes = shape.tensor_bytes((0, 0, tokens), own_input=False)
    return sum(size for name, size in sizes.items() if name in ("q", "k"))
