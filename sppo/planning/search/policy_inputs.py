"""Inputs of an activation policy: bytes, seconds and available memory of a candidate's stages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sppo.activations.placement import Counts
from sppo.activations.policy_inputs import PolicyInputs
from sppo.activations.tensor_classes import X_IN
from sppo.cost.candidate import Candidate
from sppo.cost.deferred_weights import weight_operand_bytes
from sppo.cost.kv import kv_offload_bytes, kv_tier_bytes, largest_kv_block
from sppo.cost.layer import exchange_seconds
from sppo.cost.memory.copy_room import copy_slots, slots_on_device, tier_padding_bytes
from sppo.cost.memory.joined_tensors import block_layout
from sppo.cost.memory.stage_memory import StageMemory
from sppo.cost.memory.tier_memory import tier_bytes
from sppo.cost.memory.units_in_flight import UnitsInFlight
from sppo.cost.stage_cost import StageSeconds, copy_bytes_per_s, row_bytes_of, shared_input_bytes_of
from sppo.cost.values_of_ranks import of_ranks
from sppo.schedule.costs import Table


def policy_inputs(
    candidate: Candidate,
    *,
    seconds: StageSeconds,
    in_flight: Counts,
    units: UnitsInFlight,
    states: tuple[StageMemory, ...],
) -> PolicyInputs:
    """Return the inputs of a candidate's activation policy.

    The room of a rank is divided among its stages in proportion to their layers.

    Args:
        candidate: Candidate whose activations are placed.
        seconds: Seconds of the candidate's units, with everything retained.
        in_flight: Number of sequences whose unit is held at the worst moment, [stages,
            subsequences].
        units: Units in flight on each rank.
        states: Memory of each rank without saved activations.
    """
    count = len(candidate.lengths)
    tokens = np.array(candidate.lengths, dtype=np.int64)
    layers = np.array([len(stage) for stage in candidate.stages], dtype=np.float64)
    exchange = exchange_seconds(candidate.workload, tokens=tokens.astype(np.float64))
    exchange = layers[:, None] * exchange
    unit_s = seconds.units
    forward = _following(candidate, unit_s.forward[:, :count] - exchange)
    backward = _following(candidate, (unit_s.backward + unit_s.weight)[:, :count] - exchange)
    out, back = copy_bytes_per_s(candidate)
    used = np.array([state.device.total_bytes for state in states], dtype=np.float64)
    operands = weight_operand_bytes(candidate)
    used += units.peak(np.zeros_like(operands), deferred=operands)
    used += _kv_slots_bytes(candidate)
    virtual = candidate.virtual_stages
    shares = layers / np.tile(np.array(candidate.layers_of_ranks, dtype=np.float64), virtual)
    # Stages that recompute K and V must keep their inputs, which a policy would offload first.
    offloads = _may_offload(candidate)
    pinned = (~offloads & offloads.any()) * row_bytes_of(candidate)[:, X_IN] * (in_flight @ tokens)
    free = np.maximum(0.0, candidate.budget_bytes - used - of_ranks(candidate, pinned))
    device_room = pinned + shares * np.tile(free, virtual)
    offloading = np.maximum(1.0, of_ranks(candidate, layers * offloads))
    tier_shares = layers * offloads / np.tile(offloading, virtual)
    tier_room = tier_shares * np.tile(tier_room_bytes(candidate, states), virtual)
    tier_room = tier_room - kv_tier_bytes(candidate) * units.sequences
    tier_room = np.maximum(0.0, tier_room - tier_padding_bytes(candidate, units=units))
    hidden = np.minimum(forward * out, backward * back) * offloads[:, None]
    if not offloads.any():
        out = back = 0.0
    return PolicyInputs(
        tokens=tokens,
        row_bytes=row_bytes_of(candidate),
        shared_input_bytes=shared_input_bytes_of(candidate),
        in_flight=in_flight,
        sequences=units.sequences,
        next_forward_s=forward,
        hidden_bytes=np.maximum(0.0, hidden - kv_offload_bytes(candidate)),
        linear_recompute_s=seconds.units.linear_recompute[:, :count],
        attention_recompute_s=seconds.units.attention_recompute[:, :count],
        copy_bytes_per_s=min(out, back),
        device_bytes=device_room,
        tier_bytes=tier_room,
        allow_partial=candidate.allow_partial,
        slots=copy_slots(candidate, shares=shares),
        lasts=tuple(own.stop - 1 for own in candidate.distinct_sequences),
    )


def _may_offload(candidate: Candidate) -> npt.NDArray[np.bool_]:
    """Return whether the activation policy may offload saved tensors of each stage, [stages]."""
    stages = range(candidate.num_stages)
    if candidate.policy != "hybrid":
        return np.ones(len(stages), dtype=np.bool_)
    if candidate.kv == "recomputed":
        return np.zeros(len(stages), dtype=np.bool_)
    return np.array([candidate.kv_of_stage(stage) != "recomputed" for stage in stages])


def tier_room_bytes(candidate: Candidate, states: tuple[StageMemory, ...]) -> Table:
    """Return the bytes of the activation tier that are free for activations, [ranks]."""
    tier, hardware = candidate.tier, candidate.workload.hardware
    if tier == "device":
        return np.zeros(len(states))
    room = hardware.host_bytes_per_device if tier == "host" else hardware.disk_bytes_per_device
    taken = [tier_bytes(state, tier, activations=tier, state=candidate.state) for state in states]
    return room - np.array(taken, dtype=np.float64)


def _kv_slots_bytes(candidate: Candidate) -> Table:
    """Return the bytes of each rank's slots for blocks of K and V, [ranks]."""
    block_bytes = largest_kv_block(candidate)
    slots = [
        slots_on_device(candidate, block_layout(candidate, stage=rank))
        for rank in range(candidate.pipeline_parallel_degree)
    ]
    return np.array(slots, dtype=np.float64) * block_bytes


def _following(candidate: Candidate, seconds: Table) -> Table:
    """Return the seconds of each subsequence's successor; the last one's own for the last."""
    following: Table = np.concatenate([seconds[:, 1:], seconds[:, -1:]], axis=1)
    lasts = [own.stop - 1 for own in candidate.distinct_sequences]
    following[:, lasts] = seconds[:, lasts]
    return following
