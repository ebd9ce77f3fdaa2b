"""Inputs of an activation policy: bytes, seconds and available memory of a candidate's stages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sppo.activations.placement import Counts
from sppo.activations.policy_inputs import PolicyInputs
from sppo.cost.candidate import Candidate, of_ranks
from sppo.cost.kv import kv_offload_bytes, kv_tier_bytes
from sppo.cost.layer import exchange_seconds
from sppo.cost.layer_kinds import LayerKind
from sppo.cost.memory.copy_room import copy_slots, tier_padding_bytes
from sppo.cost.memory.stage_memory import StageMemory, tier_buckets
from sppo.cost.memory.state_memory import state_memory
from sppo.cost.memory.walk import walk_of
from sppo.cost.stages.links import copy_bytes_per_s
from sppo.cost.stages.saved_bytes import row_bytes_of, shared_input_bytes_of
from sppo.cost.stages.seconds import stage_seconds
from sppo.schedule.costs import Table


def policy_inputs(candidate: Candidate) -> PolicyInputs:
    """Return the inputs of a candidate's activation policy.

    The device has room for everything: callers give the policy less room while its placement does
    not fit (:func:`sppo.planning.search.evaluation.evaluate_candidate`).
    """
    seconds, states = stage_seconds(candidate), state_memory(candidate)
    count = len(candidate.lengths)
    tokens = np.array(candidate.lengths, dtype=np.int64)
    forward, backward = (
        _following(candidate, passes[:, :count] - exchange)
        for passes, exchange in zip(
            (seconds.forward, seconds.backward + seconds.weight),
            _exchange_seconds(candidate),
            strict=True,
        )
    )
    out, back = copy_bytes_per_s(candidate)
    offloads = _may_offload(candidate)
    tier_room = tier_room_bytes(candidate, states)
    sequences = walk_of(candidate).sequences_held
    in_tier = tier_padding_bytes(candidate) + kv_tier_bytes(candidate) * sequences
    hidden = np.minimum(forward * out, backward * back) - kv_offload_bytes(candidate)
    if not offloads.any():
        out = back = 0.0
    return PolicyInputs(
        tokens=tokens,
        row_bytes=row_bytes_of(candidate),
        shared_input_bytes=shared_input_bytes_of(candidate),
        in_flight=_most_tokens_in_flight(candidate),
        sequences=sequences,
        next_forward_s=forward,
        hidden_bytes=np.maximum(0.0, hidden),
        linear_recompute_s=seconds.linear_recompute[:, :count],
        attention_recompute_s=seconds.attention_recompute[:, :count],
        copy_bytes_per_s=min(out, back),
        may_offload=offloads,
        device_bytes=np.full(len(states), np.inf),
        tier_bytes=np.maximum(0.0, tier_room - of_ranks(candidate, in_tier)),
        slots=copy_slots(candidate),
        allow_partial=candidate.allow_partial,
        lasts=tuple(own.stop - 1 for own in candidate.distinct_sequences),
    )


def _exchange_seconds(candidate: Candidate) -> tuple[Table, Table]:
    """Return the seconds of a forward's exchanges in all layers, and in those with a backward.

    [stages, subsequences] each.
    """
    tokens = np.array(candidate.lengths, dtype=np.float64)

    def of_kind(kind: LayerKind) -> Table:
        return exchange_seconds(candidate.workload, kind.type, tokens=tokens)

    return (
        candidate.sums_over_layers(of_kind),
        candidate.sums_over_layers(lambda kind: of_kind(kind) * kind.has_backward),
    )


def _most_tokens_in_flight(candidate: Candidate) -> Counts:
    """Return how often each unit is held when a rank holds most tokens, at least 1, [stages, N].

    A unit that is not held at that moment is held at another. Each unit of a single sequence, or
    of packed sequences, whose units are numbered through, is held at most once.
    """
    shape = candidate.num_stages, len(candidate.lengths)
    if candidate.sequences == 1:
        return np.ones(shape, dtype=np.int64)
    tokens = np.broadcast_to(np.array(candidate.lengths, dtype=np.float64), shape)
    return np.maximum(walk_of(candidate).counts(tokens), 1)


def _may_offload(candidate: Candidate) -> npt.NDArray[np.bool_]:
    """Return whether the activation policy may offload saved tensors of each stage, [stages]."""
    stages = range(candidate.num_stages)
    if candidate.policy != "hybrid":
        return np.ones(len(stages), dtype=np.bool_)
    if candidate.kv == "recomputed":
        return np.zeros(len(stages), dtype=np.bool_)
    return np.array([kv != "recomputed" for kv in candidate.kv_of_stages])


def tier_room_bytes(candidate: Candidate, states: tuple[StageMemory, ...]) -> Table:
    """Return the bytes of the activation tier that are free for activations, [ranks]."""
    tier, hardware = candidate.tier, candidate.workload.hardware
    if tier == "device":
        return np.zeros(len(states))
    room = hardware.host_bytes_per_device if tier == "host" else hardware.disk_bytes_per_device
    buckets = [
        tier_buckets(state, tier, activations=tier, state=candidate.state) for state in states
    ]
    taken = [sum(own.values()) for own in buckets]
    return room - np.array(taken, dtype=np.float64)


def _following(candidate: Candidate, seconds: Table) -> Table:
    """Return the seconds of each subsequence's successor; the last one's own for the last."""
    following: Table = np.concatenate([seconds[:, 1:], seconds[:, -1:]], axis=1)
    lasts = [own.stop - 1 for own in candidate.distinct_sequences]
    following[:, lasts] = seconds[:, lasts]
    return following
