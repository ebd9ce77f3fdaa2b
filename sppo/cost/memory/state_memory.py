"""Predicted memory of every device before activations: training state, collectives, K and V."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from sppo.activations.placement import Counts
from sppo.config.run import RunConfig
from sppo.cost.candidate import Candidate, of_ranks
from sppo.cost.communicators import communicators_bytes
from sppo.cost.memory.messages import sent_bytes
from sppo.cost.memory.process_growth import process_growth_bytes
from sppo.cost.memory.stage_memory import MemoryBuckets, StageMemory
from sppo.cost.memory.walk import bytes_at_peak, walk_of
from sppo.cost.sharding.collectives import REDUCE_BUCKET_BYTES, REDUCE_BUCKETS
from sppo.cost.sharding.weight_parts import (
    ShardedParts,
    device_parameters,
    kept_parameters,
    most_held_of_ranks,
    outer_by_copies,
    rank_parts,
    same_weights_degree,
    streamed_weights,
)
from sppo.cost.trainable import parameter_counts, trainable_of_run, trains_head
from sppo.cost.workload import ACCUMULATION_BYTES, ELEMENT_BYTES, NUM_MOMENTS
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
    walk = walk_of(candidate)
    at_peak = bytes_at_peak(candidate, walk, sent=walk.running(sent_bytes(candidate)))
    weights, gradients = _held_elements(candidate)
    stepped, summed = (
        of_ranks(candidate, kept_parameters(candidate, shards_from=zero, trained=True))
        for zero in (1, 2)
    )
    masters = ACCUMULATION_BYTES if element < ACCUMULATION_BYTES else 0
    optimizer = stepped * (candidate.workload.moments_bytes + masters)
    copied = np.array(checkpoint_bytes(candidate)) * candidate.background_saves
    last = candidate.rank_of_stage(candidate.num_stages - 1)
    on_cpu = device.kind == "cpu"
    buckets = {
        "weights_bytes": (weights + _whole_elements(candidate, shards_from=3)) * element,
        "gradients_bytes": (gradients + _whole_elements(candidate, shards_from=2, trained=True))
        * ACCUMULATION_BYTES,
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
        "tier_weights_bytes": of_ranks(candidate, streamed_weights(candidate)) * element,
        "tier_gradients_bytes": summed * ACCUMULATION_BYTES * tiers.streams_gradients,
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


def whole_checkpoint_bytes(run: RunConfig) -> int:
    """Return the bytes of a whole checkpoint of a run: fp32 weights and both moments."""
    moments = NUM_MOMENTS * ELEMENT_BYTES[run.optimizer.moments]
    trained, _ = parameter_counts(run.model, trainable_of_run(run))
    return (ACCUMULATION_BYTES + moments) * trained


def _saved_parameters(candidate: Candidate) -> Table:
    """Return the parameters of each stage that one device writes into a checkpoint, [stages].

    Frozen ones are not written. A tied embedding that two ranks update is written by the first.
    """
    saved = kept_parameters(candidate, shards_from=1, trained=True)
    if candidate.pipeline_parallel_degree > 1:
        saved[-1] -= _tied_elements(candidate, shards_from=1, trained=True)
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
    tiers, looped = candidate.state, candidate.order == LOOPED
    ends_meet = candidate.pipeline_parallel_degree == 1 and candidate.virtual_stages > 1
    streamed = streamed_weights(candidate)
    held_weights = of_ranks(candidate, kept_parameters(candidate, shards_from=3) - streamed)
    if tiers.streams_weights:
        tied = _tied_elements(candidate, shards_from=3)
        if not tiers.streams_trained_weights:
            tied -= _tied_elements(candidate, shards_from=3, trained=True)
        streamed[-1] += tied * ends_meet
        held_weights += most_held_of_ranks(candidate, streamed, consecutive=looped)
    gradients = kept_parameters(candidate, shards_from=2, trained=True)
    if not tiers.streams_gradients:
        return held_weights, of_ranks(candidate, gradients)
    tied = _tied_elements(candidate, shards_from=2, trained=True) * ends_meet
    gradients[0] -= tied
    alone = looped and candidate.sequences == 1
    return held_weights, most_held_of_ranks(candidate, gradients, consecutive=alone) + tied


def _whole_elements(candidate: Candidate, *, shards_from: int, trained: bool = False) -> Table:
    """Return the elements of parts that are whole while in use alone, [ranks].

    Args:
        candidate: Candidate to price.
        shards_from: ZeRO stage from which on parts are sharded between uses.
        trained: Whether only parameters that train count.
    """
    parts = _parts_of_ranks(candidate, trained=trained)
    room = np.array([own.room_elements for own in parts])
    whole: Table = room * (candidate.zero >= shards_from)
    return whole


def _parts_of_ranks(candidate: Candidate, *, trained: bool) -> list[ShardedParts]:
    """Return the sharded parts of each pipeline rank: of all parameters, or those that train."""
    ranks = range(candidate.pipeline_parallel_degree)
    return [rank_parts(candidate, rank=rank, trained=trained) for rank in ranks]


def _tied_elements(candidate: Candidate, *, shards_from: int, trained: bool = False) -> float:
    """Return the elements of a tied embedding that a device keeps between uses; 0 without one.

    Args:
        candidate: Candidate to price.
        shards_from: ZeRO stage from which on a device keeps its shard alone.
        trained: Whether a frozen embedding counts 0.
    """
    workload = candidate.workload
    model = workload.model
    if not model.tie_embeddings or (trained and not trains_head(model, workload.trainable)):
        return 0.0
    by_copies = outer_by_copies(workload, model.vocab_size * model.hidden_size)
    if candidate.zero < shards_from:
        return sum(by_copies.values())
    replicas = candidate.data_parallel_degree
    return sum(held / (copies * replicas) for copies, held in by_copies.items())


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
    return tokens * candidate.workload.hidden_row_bytes


def collective_bytes(candidate: Candidate) -> Counts:
    """Return the bytes of buffers of collectives on a device of each rank, [ranks].

    The memory of whole parts is not included. gloo, the back end of CPUs, works on a copy of the
    tensors that it reduces or gathers.
    """
    is_copied = candidate.workload.hardware.device.kind == "cpu"
    gathered, reduced = (
        np.array([own.most_elements for own in _parts_of_ranks(candidate, trained=trained)])
        for trained in (False, True)
    )
    in_step = gathered * candidate.workload.element_bytes * (candidate.zero >= 3)
    in_step = in_step + reduced * ACCUMULATION_BYTES * (candidate.zero >= 2)
    most = np.maximum(in_step * is_copied, _bucket_bytes(candidate, is_copied=is_copied))
    found: Counts = np.rint(most).astype(np.int64)
    return found


def _bucket_bytes(candidate: Candidate, *, is_copied: bool) -> Table:
    """Return the bytes of buckets at the end of a step, and of shards sent or received, [ranks].

    With ZeRO-0 and 1, buckets of gradients count, the larger ones. With ZeRO-2, only weights are
    gathered, after the memory of whole gradients is free again; with ZeRO-3, nothing is.
    """
    parameters = of_ranks(candidate, device_parameters(candidate, trained=True))
    copies = candidate.data_parallel_degree * same_weights_degree(candidate.workload)
    if copies == 1 or candidate.zero >= 3:
        return np.zeros_like(parameters)
    element = ACCUMULATION_BYTES if candidate.zero < 2 else candidate.workload.element_bytes
    most_elements = REDUCE_BUCKETS * REDUCE_BUCKET_BYTES / ACCUMULATION_BYTES
    under_way = np.minimum(most_elements, parameters) * element * (1 + 1 / copies + is_copied)
    free = _whole_elements(candidate, shards_from=2, trained=True) * ACCUMULATION_BYTES
    found: Table = np.maximum(0.0, under_way - free)
    return found
