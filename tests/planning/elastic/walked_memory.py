"""Memory of a step, counted action by action along its program, independent of the planner."""

from collections import defaultdict

import numpy as np

from sppo.cost.kv import kv_of_sequences
from sppo.cost.memory.messages import sent_bytes
from sppo.cost.memory.unit_working_sets import computing_bytes
from sppo.cost.stages.saved_bytes import placed_bytes
from sppo.cost.stages.seconds import weight_operand_bytes
from sppo.schedule.actions import ActionKind
from sppo.schedule.program import generate
from sppo.schedule.transfers.copies import place_copies

_COMPUTE = (ActionKind.F, ActionKind.B, ActionKind.W)


def schedule_of(candidate):
    """The program of a candidate with packed sequences: compute, and where K and V come back."""
    schedule = generate(
        candidate.schedule,
        num_ranks=candidate.pipeline_parallel_degree,
        num_virtual=candidate.virtual_stages,
        lengths=candidate.sequence_lengths,
        forwards_before_backward=candidate.forwards_before_backward,
        forward_only_stages=candidate.forward_only_stages,
    )
    stages = range(candidate.num_stages)
    return place_copies(
        schedule,
        kv_offloaded=[stage for stage in stages if candidate.kv_of_stages[stage] == "offloaded"],
        kv_recomputed=[stage for stage in stages if candidate.kv_of_stages[stage] == "recomputed"],
    )


def walked_peaks(candidate, held, running, schedule=None):
    """Most bytes that each rank holds of units, K and V, their gradients and operands.

    Args:
        candidate: with packed sequences.
        held: bytes of a unit from its forward to the end of its backward, [stages, units].
        running: bytes of a unit's forward and of its backward while they run.
        schedule: program of the candidate; None generates it.
    """
    schedule = schedule or schedule_of(candidate)
    return [
        max(_bytes_at_actions(candidate, program, held, running)) for program in schedule.programs
    ]


def _bytes_at_actions(candidate, program, held, running):
    """What one rank holds while each of its forwards, backwards and weight halves runs."""
    firsts = [own.start for own in candidate.distinct_sequences]
    kv_bytes, gradient_bytes, passing_bytes = kv_of_sequences(candidate)
    operands = weight_operand_bytes(candidate)
    first = candidate.forward_only_stages
    actions = [action for action in program if action.kind in _COMPUTE or _returns_kv(action)]
    deferred = {_key(action) for action in actions if action.kind is ActionKind.W}
    left, forwards = defaultdict(int), defaultdict(int)
    for action in actions:
        left[action.stage, action.sequence] += action.kind is ActionKind.B
        forwards[action.stage, action.sequence] += action.kind is ActionKind.F
    (forward, backward), units, waiting, keys, gradients, passing = running, {}, {}, {}, {}, {}
    for action in actions:
        owner = action.stage, action.sequence
        if _returns_kv(action):
            keys[owner] = kv_bytes[owner]
            continue
        unit = action.stage, firsts[action.sequence] + action.subsequence
        beside = 0.0
        if action.kind is ActionKind.F:
            units[unit] = held[unit] * (action.stage >= first)
            keys[owner] = kv_bytes[owner]
            passing[owner] = passing_bytes[owner]
            beside = forward[unit]
        elif action.kind is ActionKind.B:
            gradients[owner] = gradient_bytes[owner]
            beside = backward[unit]
        yield sum(map(_total, (units, waiting, keys, gradients, passing))) + beside
        left[owner] -= action.kind is ActionKind.B
        forwards[owner] -= action.kind is ActionKind.F
        is_last_forward = action.kind is ActionKind.F and not forwards[owner]
        if is_last_forward:
            del passing[owner]
            if candidate.kv_of_stages[action.stage] != "retained":
                del keys[owner]
        if action.kind is ActionKind.B:
            del units[unit]
            if _key(action) in deferred:
                waiting[unit] = operands[unit]
            if not left[owner]:
                del keys[owner], gradients[owner]
        elif action.kind is ActionKind.W:
            del waiting[unit]


def _returns_kv(action):
    """Whether K and V that left are there again from this action on."""
    return action.kind is ActionKind.KV or (action.kind, action.wire) == (ActionKind.H2D, "kv")


def _key(action):
    return action.stage, action.sequence, action.subsequence


def _total(held):
    return float(np.sum([*held.values()]))


def walked_device_bytes(evaluated, schedule=None):
    """Most that each rank's device holds under a placement, weights and the like included.

    Args:
        evaluated: a candidate with packed sequences and a placement.
        schedule: program of the candidate; None generates it.
    """
    candidate, placement = evaluated.candidate, evaluated.placement
    held = placed_bytes(placement, "retained", candidate=candidate)
    computing, sent = computing_bytes(candidate, placement), sent_bytes(candidate)
    peaks = walked_peaks(candidate, held, computing + sent, schedule)
    return [
        peak + _steady_bytes(rank.device)
        for peak, rank in zip(peaks, evaluated.memory, strict=True)
    ]


_STEADY = (
    "weights_bytes",
    "gradients_bytes",
    "optimizer_bytes",
    "copies_bytes",
    "loss_gradient_bytes",
    "growth_bytes",
    "communicators_bytes",
)
"""Buckets that are there all the time."""


def _steady_bytes(device):
    """Bytes of these buckets."""
    return sum(getattr(device, name) for name in _STEADY)
