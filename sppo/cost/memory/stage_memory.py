"""Memory of every device by bucket, and of the tiers behind it, before the run.

Legend: S tokens of a sequence, C of its longest subsequence, E hidden, F MLP width, K key/value
heads, D head size, V vocabulary, g sequence-parallel degree.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from sppo.activations.placement import ActivationPlacement
from sppo.cost.candidate import Candidate
from sppo.cost.kv import kv_bytes_per_token
from sppo.cost.layer import ACCUMULATION_BYTES, Workload
from sppo.cost.live_sets.working_set import forward_working_set, loss_working_set, most_working_set
from sppo.cost.memory.process_growth import process_growth_bytes
from sppo.cost.memory.unit_messages import sent_bytes
from sppo.cost.memory.unit_working_sets import computing_bytes, loss_bytes
from sppo.cost.memory.units_in_flight import KVTokens, UnitsInFlight
from sppo.cost.parameters import num_parameters
from sppo.cost.sharding.collectives import REDUCE_BUCKET_BYTES, REDUCE_BUCKETS
from sppo.cost.sharding.parts import ShardedParts, outer_by_copies, rank_parts
from sppo.cost.stage_cost import (
    device_parameters,
    most_held_of_ranks,
    most_of_ranks,
    of_ranks,
    placed_bytes,
    same_weights_degree,
    updated_parameters,
    weight_operand_bytes,
)
from sppo.schedule.costs import Table
from sppo.schedule.generators import LOOPED

UPDATE_SLOTS = 2
"""Buckets of an update behind the device that are there at once: one is stepped, one is copied."""
DISK_UPDATE_ELEMENTS = 1 << 19
"""Parameters of a bucket of an optimizer on a disk: enough for long reads, little memory."""


@dataclass(frozen=True, slots=True)
class MemoryBuckets:
    """Bytes on one device at the peak of a step, by what holds them."""

    weights_bytes: int
    """Parameters in the compute dtype; with ZeRO-3 a shard of them, and those gathered; where they
    live in another tier, those of two stages."""
    gradients_bytes: int
    """fp32 sums, whole until they are reduced once per step; from ZeRO-2 on a shard of them, and
    those that are whole until they are reduced after each use; where they live in another tier,
    those of two stages."""
    optimizer_bytes: int
    """AdamW's two moments, and fp32 masters where the weights have another compute dtype."""
    kv_bytes: int
    """K and V of every sequence in flight, of layers that have theirs on the device at once."""
    kv_gradients_bytes: int
    """Their fp32 gradients, of the sequence and the stage in backward."""
    activations_bytes: int
    """Saved tensors that stay on the device."""
    copies_bytes: int
    """Room for blocks of saved tensors on their way out or back."""
    loss_gradient_bytes: int
    """Gradient of the last layer's output, formed in forward."""
    working_bytes: int
    """Working set of the running subsequence (:mod:`sppo.cost.live_sets.working_set`), and the
    saved tensors that backward joins (:mod:`sppo.cost.memory.copy_room`)."""
    heap_bytes: int
    """Bytes that a C heap holds beyond that."""
    communication_bytes: int
    """Messages between stages, the residual stream that waits between two stages of a rank, and
    what a sequence-parallel group exchanges."""
    growth_bytes: int = 0
    """Bytes that the process takes beside tensors, see :mod:`sppo.cost.memory.process_growth`."""
    never_at_once_bytes: int = 0
    """At most 0: what is held of K and V, their gradients and saved tensors at the fullest moment
    of a step of samples, less the sum of their peaks, which come at different moments."""

    @property
    def total_bytes(self) -> int:
        """All buckets together."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def largest(self) -> str:
        """Name of the largest bucket."""
        return max((field.name for field in fields(self)), key=lambda name: getattr(self, name))


@dataclass(frozen=True, slots=True)
class StageMemory:
    """One device of a pipeline rank, with all stages of the rank, and what it puts elsewhere."""

    device: MemoryBuckets
    """Bytes on the device, by bucket."""
    tier_activations_bytes: int
    """Offloaded tensors, in the tier of activations."""
    host_optimizer_bytes: int
    """Optimizer states, in the tier of the state."""
    tier_weights_bytes: int = 0
    """Weights there."""
    tier_gradients_bytes: int = 0
    """Gradients there."""
    background_save_bytes: int = 0
    """Copy of the training state in the host memory behind a GPU, not page-locked, while a
    checkpoint is written in the background; on a CPU it is among the process's growth."""
    staging_bytes: int = 0
    """Slots in the host through which offloaded tensors pass on their way to a disk and back; on a
    CPU the copies of its device."""

    @property
    def tier_state_bytes(self) -> int:
        """Weights, gradients and optimizer states in the tier that they have."""
        return self.tier_weights_bytes + self.tier_gradients_bytes + self.host_optimizer_bytes


class _RankFigures(NamedTuple):
    """Figures of a rank that its memory follows from, beside those of all ranks.

    Attributes:
        parameters: That a device computes with.
        updated: That a device updates.
        saved: Of which a checkpoint has this device's part.
        weights: Elements held all the time.
        gradients: The same of gradients.
        kv_bytes: Most K and V.
        kv_gradients_bytes: Their gradients.
        sent_bytes: Most of messages.
        num_layers: Of all its stages.
        is_first: Whether it has the first stage.
        is_last: Whether it has the last one.
    """

    parameters: float
    updated: float
    saved: float
    weights: float
    gradients: float
    kv_bytes: float
    kv_gradients_bytes: float
    sent_bytes: int
    num_layers: int
    is_first: bool
    is_last: bool


def state_memory(candidate: Candidate, *, units: UnitsInFlight) -> tuple[StageMemory, ...]:
    """Memory of each rank without any saved activation, whatever will be recomputed."""
    parameters, updated, saved = (
        of_ranks(candidate, of_stages(candidate)).tolist()
        for of_stages in (device_parameters, updated_parameters, _saved_parameters)
    )
    sent = np.rint(most_of_ranks(candidate, sent_bytes(candidate).most)).astype(np.int64)
    kv = (table.tolist() for table in _kv_bytes(candidate, units=units))
    held, layers = _held_elements(candidate), candidate.layers_of_ranks
    last = candidate.rank_of_stage(candidate.num_stages - 1)
    is_first, is_last = ([rank == end for rank in range(len(layers))] for end in (0, last))
    columns = (parameters, updated, saved, *held, *kv, sent.tolist(), layers, is_first, is_last)
    layer = _most_working_bytes(candidate)
    working_bytes = {
        False: layer,
        True: max(layer, loss_bytes(candidate.workload, tokens=max(candidate.lengths))),
    }
    alike: dict[_RankFigures, StageMemory] = {}  # most ranks of many are
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
    """Return the bytes that a checkpoint has of each rank: fp32 weights and both moments."""
    saved = of_ranks(candidate, _saved_parameters(candidate))
    return tuple(map(_adamw_bytes, saved.tolist()))


def _saved_parameters(candidate: Candidate) -> Table:
    """Parameters of each stage of which a checkpoint has a device's part, [stages].

    Of a tied embedding that two ranks update it has the first one's.
    """
    saved = updated_parameters(candidate) if candidate.zero else device_parameters(candidate)
    if candidate.pipeline_parallel_degree > 1:
        saved[-1] -= _tied_elements(candidate)[candidate.zero > 0]
    return saved


def _adamw_bytes(parameters: float) -> int:
    """Bytes of fp32 weights and both moments."""
    return int(parameters * 3 * ACCUMULATION_BYTES)


def _rank_memory(
    candidate: Candidate,
    own: _RankFigures,
    *,
    parts: ShardedParts,
    working_bytes: int,
    loss_gradient_bytes: int,
) -> StageMemory:
    """Memory of one rank without any saved activation."""
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
        kv_bytes=int(own.kv_bytes),
        kv_gradients_bytes=int(own.kv_gradients_bytes),
        activations_bytes=0,
        copies_bytes=0,
        loss_gradient_bytes=loss_gradient_bytes,
        working_bytes=working_bytes,
        heap_bytes=round(working_bytes * candidate.workload.hardware.device.heap_share),
        communication_bytes=own.sent_bytes + collective,
        growth_bytes=process_growth_bytes(candidate, background_save_bytes=copied),
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
    """Bytes of a CPU through which buckets of an optimizer on a disk pass; 0 behind a GPU.

    Slots for gradients and weights, and what is stepped of masters and moments.
    """
    if candidate.state.optimizer != "disk":
        return 0
    bucket = min(parameters, DISK_UPDATE_ELEMENTS)
    slot = ACCUMULATION_BYTES + candidate.workload.element_bytes
    return int(bucket * (UPDATE_SLOTS * slot + 3 * ACCUMULATION_BYTES))


def _held_elements(candidate: Candidate) -> tuple[list[float], list[float]]:
    """Weights and gradients that each rank keeps on the device, without those whole in use.

    Of a tied embedding, on a rank with both ends, the last stage needs the weights, too, and the
    gradient is there from the last stage's first forward to the first stage's last backward. In the
    looped order consecutive stages follow one another; between sequences the first one's gradients
    leave while the last one's come back.
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
    """Elements of a tied embedding on a device: what it computes with, and what it updates."""
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
    """Memory of each rank with what the activation policy retains and recomputes."""
    retained = placed_bytes(
        placement.retained, recomputed=placement.recomputed, candidate=candidate
    )
    deferred = weight_operand_bytes(candidate)
    computing, sent = computing_bytes(candidate, placement), sent_bytes(candidate)
    held = units.peak(retained, deferred=deferred)
    most_computing, most_sent = (
        most_of_ranks(candidate, running.most) for running in (computing, sent)
    )
    counts_kv = bool(candidate.packed) and not keeps_a_stack(candidate)
    at_once = held
    if keeps_a_stack(candidate):
        beside = held + most_computing
        together = beside + most_sent
    else:
        kv = kv_tokens(candidate) if counts_kv else None
        if kv is not None:
            at_once = units.peak(retained, deferred=deferred, kv=kv)
        beside, together = (
            units.peak(retained, deferred=deferred, running=running, kv=kv)
            for running in (computing, computing + sent)
        )
    heap_share = candidate.workload.hardware.device.heap_share
    tables = [held, at_once, beside, together, most_sent, most_computing * heap_share]
    peaks = np.rint(tables).astype(np.int64).T.tolist()
    ranks = []
    for state, peak in zip(states, peaks, strict=True):
        saved, most, computed, everything, in_states, heap = peak
        collective = state.device.communication_bytes - in_states
        apart = saved + (state.device.kv_bytes + state.device.kv_gradients_bytes) * counts_kv
        device = replace(
            state.device,
            activations_bytes=saved,
            working_bytes=computed - most,
            heap_bytes=heap,
            communication_bytes=collective + everything - computed,
            never_at_once_bytes=min(0, most - apart),
        )
        ranks.append(replace(state, device=device))
    return tuple(ranks)


def kv_tokens(candidate: Candidate) -> KVTokens:
    """Return what K and V, and their gradients, of a token take on each stage."""
    layers = np.array([len(stage) for stage in candidate.stages], dtype=np.float64)
    kv_bytes, gradient_bytes = kv_bytes_per_token(candidate.workload)
    return KVTokens(layers * kv_bytes, layers * gradient_bytes)


def keeps_a_stack(candidate: Candidate) -> bool:
    """Return whether retained tensors lie in room set aside once: on the lone stage of a CPU."""
    on_cpu = candidate.workload.hardware.device.kind == "cpu"
    return on_cpu and candidate.num_stages == 1 and candidate.schedule == "sppo"


def evaluation_bytes(workload: Workload, *, lengths: tuple[int, ...]) -> int:
    """Memory of a forward pass alone on one device: weights, K and V, the running subsequence."""
    model, longest = workload.model, max(lengths)
    kv_bytes, _ = kv_bytes_per_token(workload)
    running = max(
        forward_working_set(workload, tokens=longest).live_bytes,
        loss_working_set(workload, tokens=longest).live_bytes,
    )
    weights = num_parameters(model) * workload.element_bytes
    return weights + round(model.num_layers * sum(lengths) * kv_bytes) + running


def _kv_bytes(candidate: Candidate, *, units: UnitsInFlight) -> tuple[Table, Table]:
    """Bytes of K and V on each rank, and of their gradients, [ranks] each.

    Buffers hold one layer of a whole sequence each, from its first forward to its last backward on
    the layer's stage unless they leave in between; those of gradients from its first backward
    there, so the stages of a rank take turns with them.
    """
    of_token = kv_tokens(candidate)
    return (
        units.peak_of_kv(of_token.kv),
        most_of_ranks(candidate, candidate.longest_sequence * of_token.gradients),
    )


def _loss_gradient_bytes(candidate: Candidate, units: UnitsInFlight) -> int:
    on_last_stage = np.zeros((candidate.num_stages, len(candidate.lengths)))
    on_last_stage[-1] = candidate.lengths
    tokens = int(units.peak(on_last_stage)[-1]) // candidate.workload.sequence_parallel_degree
    return tokens * candidate.workload.model.hidden_size * candidate.workload.element_bytes


def _most_working_bytes(candidate: Candidate) -> int:
    """Bytes of the longest subsequence's working set, whatever is recomputed."""
    tokens = _longest(candidate)
    return most_working_set(
        candidate.workload,
        tokens=tokens,
        prefix=candidate.longest_sequence - 1,
        input_every=candidate.input_every,
        layers=max(len(stage) for stage in candidate.stages),
    ).live_bytes


def _longest(candidate: Candidate) -> int:
    """Tokens of the longest subsequence on one device."""
    longest = max(candidate.lengths)
    return -(-longest // candidate.workload.sequence_parallel_degree)


def collective_bytes(candidate: Candidate, *, rank: int) -> int:
    """Bytes of gradients and weights on their way on a device of a rank."""
    parameters = float(of_ranks(candidate, device_parameters(candidate))[rank])
    parts = rank_parts(candidate, rank=rank)
    return _collective_bytes(candidate, parts, parameters=parameters)


def _collective_bytes(candidate: Candidate, parts: ShardedParts, *, parameters: float) -> int:
    """Bytes of gradients and weights on their way, beyond those of whole parts.

    gloo, over which CPUs talk, works on a copy of what it reduces and of what it gathers.
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
    """Bytes of buckets at the end of a step, and of what a device sends or gets of each.

    With ZeRO-0 and 1 those of gradients, which are the larger ones. With ZeRO-2 only weights are
    gathered, when the room of whole gradients is free again; with ZeRO-3 nothing is.
    """
    copies = candidate.data_parallel_degree * same_weights_degree(candidate.workload)
    if copies == 1 or candidate.zero >= 3:
        return 0.0
    element = ACCUMULATION_BYTES if candidate.zero < 2 else candidate.workload.element_bytes
    most_elements = REDUCE_BUCKETS * REDUCE_BUCKET_BYTES / ACCUMULATION_BYTES
    under_way = min(most_elements, parameters) * element * (1 + 1 / copies + is_copied)
    free = parts.room_elements * ACCUMULATION_BYTES if candidate.zero >= 2 else 0.0
    return max(0.0, under_way - free)
