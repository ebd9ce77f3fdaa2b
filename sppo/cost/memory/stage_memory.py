"""Predicted memory of every device by bucket, and of host memory and disk.

Legend: S tokens of a sequence, C of its longest subsequence, E hidden, F MLP width, K key/value
heads, D head size, V vocabulary, g sequence-parallel degree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from sppo.activations.placement import ActivationPlacement, Counts
from sppo.cost.candidate import Candidate
from sppo.cost.communicators import communicators_bytes
from sppo.cost.deferred_weights import weight_operand_bytes
from sppo.cost.kv import kv_bytes_per_token
from sppo.cost.layer import ACCUMULATION_BYTES, Workload
from sppo.cost.live_sets.working_set import forward_working_set, loss_working_set, most_working_set
from sppo.cost.memory.process_growth import process_growth_bytes
from sppo.cost.memory.unit_messages import sent_bytes
from sppo.cost.memory.unit_working_sets import computing_bytes, loss_bytes
from sppo.cost.memory.units_in_flight import UnitsInFlight
from sppo.cost.parameters import num_parameters
from sppo.cost.sharding.collectives import REDUCE_BUCKET_BYTES, REDUCE_BUCKETS
from sppo.cost.sharding.stage_parameters import (
    device_parameters,
    same_weights_degree,
    updated_parameters,
)
from sppo.cost.sharding.weight_parts import ShardedParts, outer_by_copies, rank_parts
from sppo.cost.stage_cost import placed_bytes
from sppo.cost.values_of_ranks import most_held_of_ranks, of_ranks
from sppo.schedule.costs import Table
from sppo.schedule.orders.names import LOOPED

UPDATE_SLOTS = 2
"""Buckets of an optimizer off the device that have slots at once: one is stepped, one copied."""
DISK_UPDATE_ELEMENTS = 1 << 19
"""Parameters of a bucket of an optimizer on a disk: long enough reads at little memory."""


@dataclass(frozen=True, slots=True)
class MemoryBuckets:
    """Bytes on one device at the peak of a step, by purpose."""

    weights_bytes: int
    """Weights in the compute dtype: with ZeRO-3 a shard and the gathered parts; if weights live in
    another tier, those of two stages."""
    gradients_bytes: int
    """fp32 sums of gradients: whole with ZeRO-0 and 1, which reduce them once per step; with ZeRO-2
    and 3 a shard, and the parts that are whole until they are reduced after each use; if gradients
    live in another tier, those of two stages."""
    optimizer_bytes: int
    """Both moments of AdamW, and fp32 masters if the compute dtype is not fp32. If they live on a
    disk, slots through which buckets pass instead; if in host memory, 0."""
    kv_bytes: int
    """K and V of all sequences in flight, in the layers whose K and V are on the device at once."""
    kv_gradients_bytes: int
    """fp32 gradients of K and V of the sequence and stage in backward."""
    activations_bytes: int
    """Retained saved tensors."""
    copies_bytes: int
    """Slots for blocks of saved tensors that are copied to or from the next tier."""
    loss_gradient_bytes: int
    """Gradient of the last layer's output, which is formed in forward."""
    working_bytes: int
    """Working set of the running subsequence (:mod:`sppo.cost.live_sets.working_set`), and the
    saved tensors that backward joins (:mod:`sppo.cost.memory.copy_room`)."""
    heap_bytes: int
    """Free memory that the C heap holds beyond the working set."""
    communication_bytes: int
    """Messages between stages, units that wait between two stages of a rank, tensors exchanged in a
    sequence-parallel group, and buffers of collectives."""
    growth_bytes: int = 0
    """Memory of the process beyond tensors, see :mod:`sppo.cost.memory.process_growth`."""
    communicators_bytes: int = 0
    """Buffers that NCCL allocates for the communicators of a GPU, outside of torch's allocator
    (:mod:`sppo.cost.communicators`)."""

    @property
    def total_bytes(self) -> int:
        """Sum of all buckets."""
        return sum(_bucket_bytes_of(self))

    @property
    def largest(self) -> str:
        """Name of the largest bucket."""
        sizes = _bucket_bytes_of(self)
        return _BUCKETS[sizes.index(max(sizes))]


_BUCKETS = tuple(field.name for field in fields(MemoryBuckets))
_bucket_bytes_of: Callable[[MemoryBuckets], tuple[int, ...]] = attrgetter(*_BUCKETS)
"""Function that returns the bytes of each bucket."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of one device of a pipeline rank, all stages of the rank together, in every tier."""

    device: MemoryBuckets
    """Bytes on the device, by bucket."""
    tier_activations_bytes: int
    """Bytes of offloaded tensors in the tier of activations."""
    host_optimizer_bytes: int
    """Bytes of optimizer states in the tier of the training state."""
    tier_weights_bytes: int = 0
    """Bytes of weights in the tier of the training state."""
    tier_gradients_bytes: int = 0
    """Bytes of gradients in the tier of the training state."""
    background_save_bytes: int = 0
    """Bytes of the copy of the training state in a GPU's host memory, not page-locked, while a
    checkpoint is written in the background; on a CPU the copy counts in `growth_bytes`."""
    staging_bytes: int = 0
    """Bytes of slots in a GPU's host memory through which tensors pass to and from a disk; on a CPU
    they are among the copies on the device."""

    @property
    def tier_state_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer states in the tier of the training state."""
        return self.tier_weights_bytes + self.tier_gradients_bytes + self.host_optimizer_bytes


class _RankFigures(NamedTuple):
    """Figures in which ranks differ and on which the memory of a rank depends.

    Attributes:
        parameters: Parameters that a device computes with.
        updated: Parameters that a device updates.
        saved: Parameters that a checkpoint has from this device.
        weights: Elements of weights on the device, without those that are gathered for use.
        gradients: Elements of gradients on the device, without those that are whole until reduced.
        kv_bytes: K and V when most of them and their gradients are held.
        kv_gradients_bytes: Gradients of K and V at that moment.
        sent_bytes: Bytes by which messages and exchanges raise this peak.
        communicators_bytes: Buffers of communicators, without those of MSP groups.
        num_layers: Layers of all stages of the rank.
        is_first: Whether the rank has the first stage.
        is_last: Whether the rank has the last stage.
    """

    parameters: float
    updated: float
    saved: float
    weights: float
    gradients: float
    kv_bytes: int
    kv_gradients_bytes: int
    sent_bytes: int
    communicators_bytes: int
    num_layers: int
    is_first: bool
    is_last: bool


def state_memory(candidate: Candidate, *, units: UnitsInFlight) -> tuple[StageMemory, ...]:
    """Return the memory of each rank without saved activations, for any activation policy."""
    parameters, updated, saved = (
        of_ranks(candidate, of_stages(candidate)).tolist()
        for of_stages in (device_parameters, updated_parameters, _saved_parameters)
    )
    at_peak = _at_peak(
        units,
        activations=np.zeros(1),
        computing=np.zeros(1),
        sent=units.running(sent_bytes(candidate)),
    )
    kv, gradients, sent = (
        at_peak[name].tolist() for name in ("kv_bytes", "kv_gradients_bytes", "communication_bytes")
    )
    held, layers = _held_elements(candidate), candidate.layers_of_ranks
    last = candidate.rank_of_stage(candidate.num_stages - 1)
    is_first, is_last = ([rank == end for rank in range(len(layers))] for end in (0, last))
    communicators = [communicators_bytes(candidate, position=rank) for rank in range(len(layers))]
    columns = (
        *(parameters, updated, saved, *held, kv, gradients, sent, communicators),
        *(layers, is_first, is_last),
    )
    layer = _most_working_bytes(candidate)
    working_bytes = {
        False: layer,
        True: max(layer, loss_bytes(candidate.workload, tokens=max(candidate.lengths))),
    }
    alike: dict[_RankFigures, StageMemory] = {}  # In long pipelines most ranks are equal.
    ranks = []
    for rank, figures in enumerate(zip(*columns, strict=True)):
        own = _RankFigures(*figures)
        if own not in alike:
            alike[own] = _rank_memory(
                candidate,
                own,
                parts=rank_parts(candidate, rank=rank),
                working_bytes=working_bytes[own.is_last],
                loss_gradient_bytes=_loss_gradient_bytes(candidate, units) if own.is_last else 0,
            )
        ranks.append(alike[own])
    return tuple(ranks)


def checkpoint_bytes(candidate: Candidate) -> tuple[int, ...]:
    """Return the bytes of a checkpoint from each rank: fp32 weights and both moments, [ranks]."""
    saved = of_ranks(candidate, _saved_parameters(candidate))
    return tuple(map(_adamw_bytes, saved.tolist()))


def _saved_parameters(candidate: Candidate) -> Table:
    """Return the parameters of each stage that one device writes into a checkpoint, [stages].

    A tied embedding that two ranks update is written by the first.
    """
    saved = updated_parameters(candidate) if candidate.zero else device_parameters(candidate)
    if candidate.pipeline_parallel_degree > 1:
        saved[-1] -= _tied_elements(candidate)[candidate.zero > 0]
    return saved


def _adamw_bytes(parameters: float) -> int:
    """Return the bytes of fp32 weights and both moments."""
    return int(parameters * 3 * ACCUMULATION_BYTES)


def _rank_memory(
    candidate: Candidate,
    own: _RankFigures,
    *,
    parts: ShardedParts,
    working_bytes: int,
    loss_gradient_bytes: int,
) -> StageMemory:
    """Return the memory of one rank without saved activations."""
    tiers, element = candidate.state, candidate.workload.element_bytes
    masters = ACCUMULATION_BYTES if element < ACCUMULATION_BYTES else 0
    stepped = own.updated if candidate.zero else own.parameters
    optimizer = int(stepped * (2 * ACCUMULATION_BYTES + masters))
    copied = _adamw_bytes(own.saved) if candidate.background_saves else 0
    is_cpu = candidate.workload.hardware.device.kind == "cpu"
    kept_weights = (own.updated if candidate.zero >= 3 else own.parameters) * element
    kept_gradients = (own.updated if candidate.zero >= 2 else own.parameters) * ACCUMULATION_BYTES
    weights = own.weights + parts.room_elements * (candidate.zero >= 3)
    gradients = own.gradients + parts.room_elements * (candidate.zero >= 2)
    collective = _collective_bytes(candidate, parts, parameters=own.parameters)
    buckets = MemoryBuckets(
        weights_bytes=int(weights * element),
        gradients_bytes=int(gradients * ACCUMULATION_BYTES),
        optimizer_bytes=_update_room_bytes(candidate, parameters=stepped)
        if tiers.offloads_optimizer
        else optimizer,
        kv_bytes=own.kv_bytes,
        kv_gradients_bytes=own.kv_gradients_bytes,
        activations_bytes=0,
        copies_bytes=0,
        loss_gradient_bytes=loss_gradient_bytes,
        working_bytes=working_bytes,
        heap_bytes=round(working_bytes * candidate.workload.hardware.device.heap_share),
        communication_bytes=own.sent_bytes + collective,
        growth_bytes=process_growth_bytes(candidate, background_save_bytes=copied),
        communicators_bytes=own.communicators_bytes,
    )
    return StageMemory(
        buckets,
        0,
        _adamw_bytes(stepped) * tiers.offloads_optimizer,
        int(kept_weights) * tiers.streams_weights,
        int(kept_gradients) * tiers.streams_gradients,
        0 if is_cpu else copied,
    )


def _update_room_bytes(candidate: Candidate, *, parameters: float) -> int:
    """Return the bytes through which buckets of an optimizer on a disk pass; 0 for other tiers.

    They hold slots for gradients and weights, and masters and moments of the bucket being stepped.
    """
    if candidate.state.optimizer != "disk":
        return 0
    bucket = min(parameters, DISK_UPDATE_ELEMENTS)
    slot = ACCUMULATION_BYTES + candidate.workload.element_bytes
    return int(bucket * (UPDATE_SLOTS * slot + 3 * ACCUMULATION_BYTES))


def _held_elements(candidate: Candidate) -> tuple[list[float], list[float]]:
    """Return the elements of weights and of gradients on the device of each rank, [ranks] each.

    Parts that are gathered or whole only while in use are not included. If one rank has both the
    first and the last stage, its last stage also needs the weights of a tied embedding, and the
    embedding's gradient is on the device from the last stage's first forward to the first stage's
    last backward. In the looped order, the stages on the device are consecutive, except between
    sequences, when gradients of the first stage leave while those of the last come back.
    """
    tiers = candidate.state
    whole, own = device_parameters(candidate), updated_parameters(candidate)
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
    return held_weights.tolist(), held_gradients.tolist()


def _tied_elements(candidate: Candidate) -> tuple[float, float]:
    """Return the elements of a tied embedding that a device computes with, and that it updates."""
    workload = candidate.workload
    if not workload.model.tie_embeddings:
        return 0.0, 0.0
    by_copies = outer_by_copies(workload, workload.model.vocab_size * workload.model.hidden_size)
    replicas = candidate.data_parallel_degree
    own = sum(held / (copies * replicas) for copies, held in by_copies.items())
    return sum(by_copies.values()), own


def with_activations(
    states: tuple[StageMemory, ...],
    *,
    candidate: Candidate,
    placement: ActivationPlacement,
    units: UnitsInFlight,
) -> tuple[StageMemory, ...]:
    """Return the memory of each rank with activations that a placement retains and recomputes.

    Slots and the tier are not included: see :func:`sppo.cost.memory.copy_room.with_placement`.
    """
    computing = units.running(computing_bytes(candidate, placement))
    sent = units.running(sent_bytes(candidate))
    activations = units.held(
        placed_bytes(placement, "retained", candidate=candidate),
        deferred=weight_operand_bytes(candidate),
    )
    if candidate.keeps_a_stack:
        activations[:] = activations.max(axis=1, keepdims=True)
    at_peak = _at_peak(units, activations=activations, computing=computing, sent=sent)
    without = _at_peak(units, activations=np.zeros(1), computing=np.zeros(1), sent=sent)
    before = np.array([state.device.communication_bytes for state in states])
    collectives = before - without["communication_bytes"]
    heap_share = candidate.workload.hardware.device.heap_share
    buckets = {
        **at_peak,
        "communication_bytes": collectives + at_peak["communication_bytes"],
        "heap_bytes": np.rint(computing.max(axis=1) * heap_share).astype(np.int64),
    }
    figures = zip(*(table.tolist() for table in buckets.values()), strict=True)
    return tuple(
        replace(state, device=replace(state.device, **dict(zip(buckets, own, strict=True))))
        for state, own in zip(states, figures, strict=True)
    )


def _at_peak(
    units: UnitsInFlight, *, activations: Table, computing: Table, sent: Table
) -> dict[str, Counts]:
    """Return the bytes of each rank by bucket when it holds most, [ranks] each.

    Saved tensors, K and V and their gradients are those of the moment when most of them are held
    together. Working set and messages count by as much as they raise the peak. Sequences of equal
    length leave the buffers of K and V and of their gradients to each other, from step to step, so
    these are always as large as at their own peaks.

    Args:
        units: Units in flight on each rank.
        activations: Bytes of saved tensors while each action runs, [ranks, actions].
        computing: Bytes of the working set of each action, [ranks, actions].
        sent: Bytes of the messages of each action, [ranks, actions].
    """
    of_sequences = [units.kv, units.kv_gradients]
    if not units.candidate.packed:
        of_sequences = [table.max(axis=1, keepdims=True) for table in of_sequences]
    held = of_sequences[0] + of_sequences[1] + activations
    fullest = held.argmax(axis=1)[:, None]
    kv, gradients = (
        np.rint(np.take_along_axis(np.broadcast_to(table, held.shape), fullest, axis=1)[:, 0])
        for table in of_sequences
    )
    most, beside, together = (
        np.rint(table.max(axis=1)) for table in (held, held + computing, held + computing + sent)
    )
    buckets = {
        "kv_bytes": kv,
        "kv_gradients_bytes": gradients,
        "activations_bytes": most - kv - gradients,
        "working_bytes": beside - most,
        "communication_bytes": together - beside,
    }
    return {name: table.astype(np.int64) for name, table in buckets.items()}


def evaluation_bytes(workload: Workload, *, lengths: tuple[int, ...]) -> int:
    """Return the bytes of a forward-only pass on one device: weights, K and V, working set."""
    model, longest = workload.model, max(lengths)
    kv_bytes, _ = kv_bytes_per_token(workload)
    running = max(
        forward_working_set(workload, tokens=longest).live_bytes,
        loss_working_set(workload, tokens=longest).live_bytes,
    )
    weights = num_parameters(model) * workload.element_bytes
    return weights + round(model.num_layers * sum(lengths) * kv_bytes) + running


def _loss_gradient_bytes(candidate: Candidate, units: UnitsInFlight) -> int:
    tokens = _most_tokens_on_last_stage(candidate, units)
    tokens //= candidate.workload.sequence_parallel_degree
    return tokens * candidate.workload.model.hidden_size * candidate.workload.element_bytes


def _most_tokens_on_last_stage(candidate: Candidate, units: UnitsInFlight) -> int:
    """Return the most tokens whose units the last stage holds at once.

    A single sequence is held whole, as all its forwards precede its backwards there.
    """
    if candidate.sequences == 1 and not candidate.packed:
        return sum(candidate.lengths)
    on_last_stage = np.zeros((candidate.num_stages, len(candidate.lengths)))
    on_last_stage[-1] = candidate.lengths
    return int(units.peak(on_last_stage)[-1])


def _most_working_bytes(candidate: Candidate) -> int:
    """Return an upper bound of the working set's bytes, for any activation policy."""
    tokens = _longest(candidate)
    return most_working_set(
        candidate.workload,
        tokens=tokens,
        prefix=candidate.longest_sequence - 1,
        input_every=candidate.input_every,
        layers=max(len(stage) for stage in candidate.stages),
    ).live_bytes


def _longest(candidate: Candidate) -> int:
    """Return the tokens of the longest subsequence on one device."""
    longest = max(candidate.lengths)
    return -(-longest // candidate.workload.sequence_parallel_degree)


def collective_bytes(candidate: Candidate, *, rank: int) -> int:
    """Return the bytes of buffers of collectives on a device of a pipeline rank."""
    parameters = float(of_ranks(candidate, device_parameters(candidate))[rank])
    parts = rank_parts(candidate, rank=rank)
    return _collective_bytes(candidate, parts, parameters=parameters)


def _collective_bytes(candidate: Candidate, parts: ShardedParts, *, parameters: float) -> int:
    """Return the bytes of buffers of collectives, without the memory of whole parts.

    gloo, the back end of CPUs, works on a copy of the tensors that it reduces or gathers.
    """
    is_copied = candidate.workload.hardware.device.kind == "cpu"
    element = candidate.workload.element_bytes
    gathered = element if candidate.zero >= 3 else 0
    reduced = ACCUMULATION_BYTES if candidate.zero >= 2 else 0
    in_step = parts.most_elements * (gathered + reduced) * is_copied
    return round(max(in_step, _bucket_bytes(candidate, parts, parameters, is_copied=is_copied)))


def _bucket_bytes(
    candidate: Candidate, parts: ShardedParts, parameters: float, *, is_copied: bool
) -> float:
    """Return the bytes of buckets at the end of a step, and of the shards sent or received of them.

    With ZeRO-0 and 1, buckets of gradients count, the larger ones. With ZeRO-2, only weights are
    gathered, after the memory of whole gradients is free again; with ZeRO-3, nothing is.
    """
    copies = candidate.data_parallel_degree * same_weights_degree(candidate.workload)
    if copies == 1 or candidate.zero >= 3:
        return 0.0
    element = ACCUMULATION_BYTES if candidate.zero < 2 else candidate.workload.element_bytes
    most_elements = REDUCE_BUCKETS * REDUCE_BUCKET_BYTES / ACCUMULATION_BYTES
    under_way = min(most_elements, parameters) * element * (1 + 1 / copies + is_copied)
    free = parts.room_elements * ACCUMULATION_BYTES if candidate.zero >= 2 else 0.0
    return max(0.0, under_way - free)
