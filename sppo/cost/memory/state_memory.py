"""Predicted memory of every device before activations: training state, collectives, K and V."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from sppo.activations.placement import Counts
from sppo.cost.candidate import Candidate, of_ranks
from sppo.cost.communicators import communicators_bytes
from sppo.cost.layer import ACCUMULATION_BYTES
from sppo.cost.memory.messages import sent_bytes
from sppo.cost.memory.process_growth import process_growth_bytes
from sppo.cost.memory.stage_memory import MemoryBuckets, StageMemory
from sppo.cost.memory.walk import bytes_at_peak, walk_of
from sppo.cost.sharding.collectives import REDUCE_BUCKET_BYTES, REDUCE_BUCKETS
from sppo.cost.sharding.weight_parts import (
    device_parameters,
    most_held_of_ranks,
    outer_by_copies,
    rank_parts,
    same_weights_degree,
    sharded_parameters,
)
from sppo.schedule.costs import Table
from sppo.schedule.orders.names import LOOPED

UPDATE_SLOTS = 2
"""Buckets of an optimizer off the device that have slots at once: one is stepped, one copied."""
DISK_UPDATE_ELEMENTS = 1 << 19
"""Parameters of a bucket of an optimizer on a disk: long enough reads at little memory."""


@lru_cache(maxsize=512)
def state_memory(candidate: Candidate) -> tuple[StageMemory, ...]:
    """Return the memory of each rank without saved activations and working sets; cached."""
    ranks, tiers = candidate.pipeline_parallel_degree, candidate.state
    element, device = candidate.workload.element_bytes, candidate.workload.hardware.device
    parameters, updated = (
        of_ranks(candidate, of_stages(candidate))
        for of_stages in (device_parameters, sharded_parameters)
    )
    at_peak = bytes_at_peak(candidate, sent=walk_of(candidate).running(sent_bytes(candidate)))
    weights, gradients = _held_elements(candidate)
    whole = np.array([rank_parts(candidate, rank=rank).room_elements for rank in range(ranks)])
    stepped = updated if candidate.zero else parameters
    kept_weights = (updated if candidate.zero >= 3 else parameters) * element
    kept_gradients = (updated if candidate.zero >= 2 else parameters) * ACCUMULATION_BYTES
    masters = ACCUMULATION_BYTES if element < ACCUMULATION_BYTES else 0
    optimizer = stepped * (candidate.workload.moments_bytes + masters)
    copied = np.array(checkpoint_bytes(candidate)) * candidate.background_saves
    last = candidate.rank_of_stage(candidate.num_stages - 1)
    on_cpu = device.kind == "cpu"
    buckets = {
        "weights_bytes": (weights + whole * (candidate.zero >= 3)) * element,
        "gradients_bytes": (gradients + whole * (candidate.zero >= 2)) * ACCUMULATION_BYTES,
        "optimizer_bytes": _update_room_bytes(candidate, parameters=stepped)
        if tiers.offloads_optimizer
        else optimizer,
        **at_peak,
        "copies_bytes": np.zeros(ranks),
        "loss_gradient_bytes": _loss_gradient_bytes(candidate) * (np.arange(ranks) == last),
        "working_bytes": np.zeros(ranks),
        "communication_bytes": at_peak["communication_bytes"] + collective_bytes(candidate),
        "growth_bytes": process_growth_bytes(candidate) + copied * on_cpu,
        "communicators_bytes": np.array(
            [communicators_bytes(candidate, position=rank) for rank in range(ranks)]
        ),
    }
    in_tiers = {
        "tier_activations_bytes": np.zeros(ranks),
        "host_optimizer_bytes": _adamw_bytes(candidate, stepped) * tiers.offloads_optimizer,
        "tier_weights_bytes": kept_weights * tiers.streams_weights,
        "tier_gradients_bytes": kept_gradients * tiers.streams_gradients,
        "background_save_bytes": copied * (not on_cpu),
    }
    return tuple(
        StageMemory(MemoryBuckets(**own), **behind)
        for own, behind in zip(of_each_rank(buckets), of_each_rank(in_tiers), strict=True)
    )


def of_each_rank(tables: Mapping[str, npt.NDArray[Any]]) -> Iterator[dict[str, int]]:
    """Yield the values of each rank by name, from tables of all ranks, [ranks] each."""
    for own in zip(*(table.astype(np.int64).tolist() for table in tables.values()), strict=True):
        yield dict(zip(tables, own, strict=True))


def checkpoint_bytes(candidate: Candidate) -> tuple[int, ...]:
    """Return the bytes of a checkpoint from each rank: fp32 weights and both moments, [ranks]."""
    saved: Counts = _adamw_bytes(candidate, of_ranks(candidate, _saved_parameters(candidate)))
    return tuple(saved.tolist())


def _saved_parameters(candidate: Candidate) -> Table:
    """Return the parameters of each stage that one device writes into a checkpoint, [stages].

    A tied embedding that two ranks update is written by the first.
    """
    saved = sharded_parameters(candidate) if candidate.zero else device_parameters(candidate)
    if candidate.pipeline_parallel_degree > 1:
        saved[-1] -= _tied_elements(candidate)[candidate.zero > 0]
    return saved


def _adamw_bytes(candidate: Candidate, parameters: Table) -> Counts:
    """Return the bytes of fp32 weights and both moments."""
    return (parameters * (ACCUMULATION_BYTES + candidate.workload.moments_bytes)).astype(np.int64)


def _update_room_bytes(candidate: Candidate, *, parameters: Table) -> Table:
    """Return the bytes through which buckets of an optimizer on a disk pass; 0 for other tiers.

    They hold slots for gradients and weights, and masters and moments of the bucket being stepped.
    """
    bucket = np.minimum(parameters, DISK_UPDATE_ELEMENTS) * (candidate.state.optimizer == "disk")
    slot = ACCUMULATION_BYTES + candidate.workload.element_bytes
    stepped = ACCUMULATION_BYTES + candidate.workload.moments_bytes
    room: Table = bucket * (UPDATE_SLOTS * slot + stepped)
    return room


def _held_elements(candidate: Candidate) -> tuple[Table, Table]:
    """Return the elements of weights and of gradients on the device of each rank, [ranks] each.

    Parts that are gathered or whole only while in use are not included. If one rank has both the
    first and the last stage, its last stage also needs the weights of a tied embedding, and the
    embedding's gradient is on the device from the last stage's first forward to the first stage's
    last backward. In the looped order, the stages on the device are consecutive, except between
    sequences, when gradients of the first stage leave while those of the last come back.
    """
    tiers = candidate.state
    whole, own = device_parameters(candidate), sharded_parameters(candidate)
    weights = own if candidate.zero >= 3 else whole
    gradients = own if candidate.zero >= 2 else whole
    tied, looped = _tied_elements(candidate), candidate.order == LOOPED
    ends_meet = candidate.pipeline_parallel_degree == 1 and candidate.virtual_stages > 1
    at_last = np.zeros(len(whole))
    at_last[-1] = tied[candidate.zero >= 3] * ends_meet
    at_first = np.zeros(len(whole))
    at_first[0] = tied[candidate.zero >= 2] * ends_meet
    held_weights = (
        most_held_of_ranks(candidate, weights + at_last, consecutive=looped)
        if tiers.streams_weights
        else of_ranks(candidate, weights)
    )
    held_gradients = (
        most_held_of_ranks(
            candidate, gradients - at_first, consecutive=looped and candidate.sequences == 1
        )
        + at_first[0]
        if tiers.streams_gradients
        else of_ranks(candidate, gradients)
    )
    return held_weights, held_gradients


def _tied_elements(candidate: Candidate) -> tuple[float, float]:
    """Return the elements of a tied embedding that a device computes with, and that it updates."""
    workload = candidate.workload
    if not workload.model.tie_embeddings:
        return 0.0, 0.0
    by_copies = outer_by_copies(workload, workload.model.vocab_size * workload.model.hidden_size)
    replicas = candidate.data_parallel_degree
    own = sum(held / (copies * replicas) for copies, held in by_copies.items())
    return sum(by_copies.values()), own


def _loss_gradient_bytes(candidate: Candidate) -> int:
    """Return the bytes of gradients of the loss that the last stage holds at once.

    A single sequence is held whole, as all its forwards precede its backwards there.
    """
    tokens = sum(candidate.lengths)
    if candidate.sequences > 1 or candidate.packed:
        on_last_stage = np.zeros((candidate.num_stages, len(candidate.lengths)))
        on_last_stage[-1] = candidate.lengths
        tokens = int(walk_of(candidate).held(on_last_stage)[-1].max())
    tokens //= candidate.workload.sequence_parallel_degree
    return tokens * candidate.workload.model.hidden_size * candidate.workload.element_bytes


def collective_bytes(candidate: Candidate) -> Counts:
    """Return the bytes of buffers of collectives on a device of each rank, [ranks].

    The memory of whole parts is not included. gloo, the back end of CPUs, works on a copy of the
    tensors that it reduces or gathers.
    """
    is_copied = candidate.workload.hardware.device.kind == "cpu"
    gathered = candidate.workload.element_bytes * (candidate.zero >= 3)
    reduced = ACCUMULATION_BYTES * (candidate.zero >= 2)
    ranks = range(candidate.pipeline_parallel_degree)
    parts = [rank_parts(candidate, rank=rank).most_elements for rank in ranks]
    in_step = np.array(parts) * (gathered + reduced) * is_copied
    most = np.maximum(in_step, _bucket_bytes(candidate, is_copied=is_copied))
    found: Counts = np.rint(most).astype(np.int64)
    return found


def _bucket_bytes(candidate: Candidate, *, is_copied: bool) -> Table:
    """Return the bytes of buckets at the end of a step, and of shards sent or received, [ranks].

    With ZeRO-0 and 1, buckets of gradients count, the larger ones. With ZeRO-2, only weights are
    gathered, after the memory of whole gradients is free again; with ZeRO-3, nothing is.
    """
    parameters = of_ranks(candidate, device_parameters(candidate))
    copies = candidate.data_parallel_degree * same_weights_degree(candidate.workload)
    if copies == 1 or candidate.zero >= 3:
        return np.zeros_like(parameters)
    element = ACCUMULATION_BYTES if candidate.zero < 2 else candidate.workload.element_bytes
    most_elements = REDUCE_BUCKETS * REDUCE_BUCKET_BYTES / ACCUMULATION_BYTES
    under_way = np.minimum(most_elements, parameters) * element * (1 + 1 / copies + is_copied)
    ranks = range(candidate.pipeline_parallel_degree)
    whole = np.array([rank_parts(candidate, rank=rank).room_elements for rank in ranks])
    free = whole * ACCUMULATION_BYTES * (candidate.zero >= 2)
    found: Table = np.maximum(0.0, under_way - free)
    return found
